"""Instruction-set levels: which exist, which this processor supports, which one runs."""

from __future__ import annotations

from . import _library


def active() -> str:
    """Name of the level whose kernels run; "reference" where plain PyTorch runs instead."""
    return "reference" if _library.why_missing else "generic"


def why() -> str:
    """One sentence on why the active level is the active one."""
    return _library.why_missing
