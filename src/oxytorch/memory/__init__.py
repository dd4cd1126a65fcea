"""Memory of devices and of the host: an allocator, its statistics, traces and what they show."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .. import _lazy

if TYPE_CHECKING:
    from .advise import advise
    from .errors import MemoryLibraryError, OutOfMemoryError
    from .pinned import PinnedMemory, pinned
    from .record import record
    from .replay import replay
    from .sites import note_sites
    from .statistics import (
        empty_cache,
        max_memory_allocated,
        max_memory_reserved,
        mem_get_info,
        memory_allocated,
        memory_report,
        memory_reserved,
        memory_snapshot,
        memory_stats,
        memory_summary,
        reset_accumulated_memory_stats,
        reset_peak_memory_stats,
        set_memory_limit,
        set_per_process_memory_fraction,
    )
    from .torch_allocator import pool, restore, use
    from .trace import load_trace

__all__ = [
    "MemoryLibraryError",
    "OutOfMemoryError",
    "PinnedMemory",
    "advise",
    "empty_cache",
    "load_trace",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_report",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_summary",
    "note_sites",
    "pinned",
    "pool",
    "record",
    "replay",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "restore",
    "set_memory_limit",
    "set_per_process_memory_fraction",
    "use",
]

_LATER = {
    **dict.fromkeys(__all__, "statistics"),
    "MemoryLibraryError": "errors",
    "OutOfMemoryError": "errors",
    "PinnedMemory": "pinned",
    "advise": "advise",
    "load_trace": "trace",
    "note_sites": "sites",
    "pinned": "pinned",
    "pool": "torch_allocator",
    "record": "record",
    "replay": "replay",
    "restore": "torch_allocator",
    "use": "torch_allocator",
}

sys.modules[__name__].__class__ = _lazy.Package
