"""Operators that a program cannot hold, in smaller ones: torch's own tables, and what they lack."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions

from ..graph.errors import UnfitError
from .calls import in_order
from .other_operators import DTYPES, RESAMPLING, by_factors, is_by_sizes

_aten = torch.ops.aten

WITH_NUMBERS = (
    _aten.addcdiv,
    _aten.addcmul,
    _aten.celu,
    _aten.hardtanh_backward,
    _aten.linalg_vector_norm,
    _aten.leaky_relu_backward,
    _aten.elu_backward,
    _aten.softplus,
    _aten.softplus_backward,
    _aten.softshrink,
    _aten.threshold,
    _aten.threshold_backward,
)
"""Operators that take numbers of unknown type, which a program cannot pass, as several others."""


def smaller_ones(handed_on: bool = False) -> dict[Any, Callable[..., Any]]:
    """What computes operators that take numbers of unknown type, and others, by smaller ones.

    A function returns NotImplemented where it does not serve for its arguments.

    handed_on: whether another compiler takes what comes of it, which fuses smaller operators.
    """
    others = [*_ACTIVATIONS] if handed_on else []
    table = {} if handed_on else _ACTIVATIONS
    return {**get_decompositions((*WITH_NUMBERS, *others)), **_OWN, **table}


def with_smaller_ones(write: Callable[[dict[Any, Callable[..., Any]]], _Written]) -> _Written:
    """What `write` makes with a table of functions that compute operators by smaller ones.

    Of the operators that a program cannot hold those that torch can write in smaller ones are, and
    no others, which are faster as they are. Raises CaptureError, which names one that it cannot.
    """
    table = smaller_ones() | _RESAMPLING
    while True:
        try:
            return write(table)
        except UnfitError as error:
            known = {**core_aten_decompositions()}
            for operator, reason in error.reasons.items():
                if operator in table or operator not in known:
                    raise reason from None
            table |= {operator: known[operator] for operator in error.reasons}


_Written = TypeVar("_Written")


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


def _spread(
    x: Tensor, dim: Sequence[int] | None, correction: Any, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """The variance of elements along dimensions, all if there are none, and their mean."""
    dims = [each % max(x.dim(), 1) for each in dim or range(x.dim())]
    count: Any = 1
    for each in dims if x.dim() else ():
        count = count * x.shape[each]
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    mean = wide.mean(dims, keepdim=True)
    squares = (wide - mean).square().sum(dims, keepdim=keepdim)
    left = count - (1 if correction is None else correction)
    variance = squares / torch.sym_max(left, 0)  # type: ignore[no-untyped-call]
    return variance, mean if keepdim else wide.mean(dims)


def _of_spread(is_root: bool, with_mean: bool) -> Callable[..., Any]:
    """The variance or its root, alone or with the mean."""

    def computed(
        x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
    ) -> Any:
        if not x.is_floating_point():
            return NotImplemented
        variance, mean = _spread(x, dim, correction, keepdim)
        found = (variance.sqrt() if is_root else variance).to(x.dtype)
        return (found, mean.to(x.dtype)) if with_mean else found

    return computed


def _sum_with(product: Callable[[Tensor, Tensor], Tensor], most_dims: int) -> Callable[..., Any]:
    """A product of matrices with something added, where a program has no step for it as it is.

    most_dims: of what a program adds by itself, where there are no factors.
    """

    def summed(x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
        if beta == alpha == 1 and x.dim() <= most_dims:
            return NotImplemented
        found = product(a, b) if alpha == 1 else product(a, b) * alpha
        if beta == 0:
            return found  # whatever x holds
        return (x if beta == 1 else x * beta) + found

    return summed


def _rrelu(x: Tensor, noise: Tensor, low: Any = 1 / 8, high: Any = 1 / 3, *rest: Any) -> Any:
    """Of a model in evaluation mode, which has one slope."""
    training = rest[0] if rest else False
    return NotImplemented if training else torch.where(x > 0, x, x * ((low + high) / 2))


def _rrelu_and_noise(x: Tensor, noise: Tensor, *rest: Any) -> Any:
    found = _rrelu(x, noise, *rest)
    return found if found is NotImplemented else (found, noise)


def _unless_ours(operator: Any) -> Callable[..., Any]:
    """Torch's way to compute an activation by smaller operators, where no kernel of ours does."""
    (written,) = get_decompositions([operator]).values()

    def smaller(x: Tensor, *numbers: Any) -> Any:
        positive = len(numbers) < 3 or numbers[2] > 0  # elu's factor of what it takes
        is_ours = x.dtype in DTYPES and x.device.type == "cpu" and positive
        return NotImplemented if is_ours else written(x, *numbers)

    return smaller


def _unless_held(operator: Any, written: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's way to resample by smaller operators, where a program has no step for it."""

    def smaller(*args: Any, **kwargs: Any) -> Any:
        arguments = in_order(operator, args, kwargs)
        given = operator, arguments[0], arguments
        is_held = by_factors(*given) is not None or is_by_sizes(*given)
        return NotImplemented if is_held else written(*args, **kwargs)

    return smaller


_ROUNDED: dict[torch.dtype, Any] = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}
_OWN: dict[Any, Callable[..., Any]] = {
    _aten.histc.default: _histc,
    _aten.var.correction: _of_spread(is_root=False, with_mean=False),
    _aten.std.correction: _of_spread(is_root=True, with_mean=False),
    _aten.var_mean.correction: _of_spread(is_root=False, with_mean=True),
    _aten.std_mean.correction: _of_spread(is_root=True, with_mean=True),
    _aten.addmm.default: _sum_with(torch.mm, 1),
    _aten.addmv.default: _sum_with(torch.mv, 0),
    _aten.baddbmm.default: _sum_with(torch.bmm, 3),
    _aten.rrelu_with_noise.default: _rrelu,
    _aten.rrelu_with_noise_functional.default: _rrelu_and_noise,
}
_ACTIVATIONS = {each: _unless_ours(each) for each in (_aten.elu.default, _aten.leaky_relu.default)}
_RESAMPLING = {
    operator: _unless_held(operator, written)
    for operator, written in get_decompositions(RESAMPLING).items()
}
