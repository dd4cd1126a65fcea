"""Choose where models run: pools of cores, tasks on cores of their own, one model in streams.

Nothing here is used by `optimize` or by an op; nothing is pinned unless it is asked for. It needs
Linux.
"""

from __future__ import annotations

from .hints import MultiStreamModuleHint
from .pinning import pin
from .pool import CPUPool, get_core_list_of_node_id
from .streams import MultiStreamModule
from .task import Task
from .worker import Future

__all__ = [
    "CPUPool",
    "Future",
    "MultiStreamModule",
    "MultiStreamModuleHint",
    "Task",
    "get_core_list_of_node_id",
    "pin",
]
