"""Operators that a program cannot hold, in smaller ones: torch's own tables, and what they lack."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

_aten = torch.ops.aten

WITH_NUMBERS = (
    _aten.addcdiv,
    _aten.addcmul,
    _aten.celu,
    _aten.elu,
    _aten.hardtanh_backward,
    _aten.leaky_relu,
    _aten.linalg_vector_norm,
    _aten.leaky_relu_backward,
    _aten.elu_backward,
    _aten.softplus,
    _aten.softplus_backward,
    _aten.softshrink,
    _aten.std,
    _aten.std_mean,
    _aten.threshold,
    _aten.threshold_backward,
    _aten.var,
    _aten.var_mean,
)
"""Operators that take numbers of unknown type, which a program cannot pass, as several others."""


def smaller_ones(more: Sequence[Any] = ()) -> dict[Any, Callable[..., Any]]:
    """What computes operators that take numbers of unknown type, and others, by smaller ones.

    A function returns NotImplemented where it does not serve for its arguments.
    """
    return {**get_decompositions((*WITH_NUMBERS, *more)), **_OWN}


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Counts of the elements in intervals of one width, as torch chooses the interval of each."""
    if x.dtype not in _ROUNDED or min >= max:
        return NotImplemented  # bounds that the values tell; an error that torch words
    low, high = (_ROUNDED[x.dtype](each).value for each in (min, max))
    places = ((x - low) * bins / _ROUNDED[x.dtype](high - low).value).to(torch.int64)
    inside = (x >= low) & (x <= high)  # which NaN is not
    places = torch.where(inside, places.clamp(max=bins - 1), bins).flatten()
    counts = x.new_zeros(bins + 1).scatter_add(0, places, torch.ones_like(places, dtype=x.dtype))
    return counts[:bins]


_ROUNDED: dict[torch.dtype, Any] = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}
_OWN: dict[Any, Callable[..., Any]] = {_aten.histc.default: _histc}
