"""Models on several machines, by Ray: `application` serves one, `write_results` runs it over rows.

Ray places, restarts and scales; `plan` says which share of a machine's cores a replica gets. Needs
the extra `oxytorch[ray]`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .. import _lazy

if TYPE_CHECKING:
    from .places import NodePlan, plan
    from .rows import Rows
    from .serving import application
    from .writing import Written, write_results

__all__ = ["NodePlan", "Rows", "Written", "application", "plan", "write_results"]

_LATER = {
    "NodePlan": "places",
    "Rows": "rows",
    "Written": "writing",
    "application": "serving",
    "plan": "places",
    "write_results": "writing",
}
sys.modules[__name__].__class__ = _lazy.Package
