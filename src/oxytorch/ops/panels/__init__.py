"""Weights in panels, the packed order that one row and thousands are multiplied with."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ... import _lazy

if TYPE_CHECKING:
    from .weight import PanelWeight

__all__ = ["PanelWeight"]

# Later, because pack_panels, which weight.py imports, imports the layout from here.
_LATER = {"PanelWeight": "weight"}
sys.modules[__name__].__class__ = _lazy.Package
