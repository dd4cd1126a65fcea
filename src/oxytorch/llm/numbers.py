"""Checks of numeric arguments before a model runs."""

from __future__ import annotations

import operator
import sys
from typing import Any


def whole(caller: str, name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return an integer in [least, most] as an int; raise ValueError for anything else."""
    expected = f"{name} >= {least}" if most is None else f"{name} {least} to {most}"
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ValueError(f"{caller}: expected {expected}, an integer, got {value!r}") from error
    if isinstance(value, bool) or number < least or (most is not None and number > most):
        raise ValueError(f"{caller}: expected {expected}, got {value!r}")
    return number


def real(caller: str, name: str, value: Any, condition: str) -> float:
    """Return a finite number as a float; condition: its range, for the error message."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{caller}: expected {name} {condition}, got {value!r}")
    return float(value)
