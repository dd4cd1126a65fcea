"""Graphs of TorchScript: the passes over programs, for the stretches of operators between their
loops, branches and writes."""

from __future__ import annotations

from . import frozen
from .fusing import fuse
from .rewrite import Outcome

__all__ = ["Outcome", "frozen", "fuse"]
