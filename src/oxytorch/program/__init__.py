"""Whole graphs as lists of operator calls that run without Python between them."""

from __future__ import annotations

from .model import ProgramModel
from .structure import Fields

__all__ = ["Fields", "ProgramModel"]
