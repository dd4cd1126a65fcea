"""Capture of a module's computation, the patterns found in it, and the forward that replaces it.

`oxytorch.graph.explain` tells what becomes of a model as a program, `free_memory` gives back what
programs keep between calls.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .. import _lazy

if TYPE_CHECKING:
    from .explain import explain
    from .memory import free_memory

__all__ = ["explain", "free_memory"]

_LATER = {"explain": "explain", "free_memory": "memory"}
sys.modules[__name__].__class__ = _lazy.Package
