"""Capture of a module's computation, the patterns found in it, and the forward that replaces it.

`oxytorch.graph.explain` tells what becomes of a model as a program.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .. import _lazy

if TYPE_CHECKING:
    from .explain import explain

__all__ = ["explain"]

_LATER = {"explain": "explain"}
sys.modules[__name__].__class__ = _lazy.Package
