"""Why a run cannot be captured, or a converted model not called."""

from __future__ import annotations

from typing import Any


class CaptureError(Exception):
    """The module cannot be captured; the text says why."""


class UnfitError(CaptureError):
    """A program cannot hold some operators of a graph.

    reasons: why, for each of them; the text is the first one.
    """

    def __init__(self, reasons: dict[Any, CaptureError]) -> None:
        super().__init__(str(next(iter(reasons.values()))))
        self.reasons = reasons


class DtypeError(RuntimeError):
    """The code of a model mixes the dtype that it was converted to with others; the text says what
    to do, and torch's own error is its cause."""

    __module__ = "oxytorch"  # where its public name is
