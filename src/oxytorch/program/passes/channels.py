"""Which values have the channels of a step's result, so that a factor for each may go before it.

Channels lie along a dimension, or along several, the first of which changes most slowly, as heads
and what is in them do.
"""

from __future__ import annotations

import math
from typing import Any

from ..program import Some, Step, Value
from .attention import OURS, TORCHS, WHOLE
from .convolution import zeros_of
from .editor import VIEWS, are_same, is_same
from .moves import is_cast

Dims = tuple[int, ...]
Found = list[tuple[Value, Dims]]

_GATED = ("oxytorch::silu_mul", "oxytorch::gelu_mul")
"""Products of a gate and a second tensor, which is no gate."""
_ATTENTION = (OURS, TORCHS, WHOLE)
_SAME = ("aten::relu", "aten::contiguous", "aten::clone")
"""Steps f with f(x / s) = f(x) / s for every positive s."""
_POOLS = (
    "aten::max_pool2d_with_indices", "aten::max_pool2d", "aten::avg_pool2d",
    "aten::_adaptive_avg_pool2d", "aten::adaptive_avg_pool2d",
)  # fmt: skip


def before(step: Step, value: Value, dims: Dims) -> Found:
    """The values that may be divided in place of a step's result, each alone, and along which
    dimensions.

    value: its result.
    dims: along which that is to be divided.
    """
    source = step.arguments[0]
    is_known = isinstance(source, Value) and source.meta is not None and value.meta is not None
    if not is_known or value is not step.results[0] or any(step.results[1:]):
        return []
    found: Found = []
    if step.target in _SAME or is_cast(step):
        found = [(source, dims)]
    elif step.target in _GATED:
        found = [(step.arguments[1], dims)]
    elif step.target == "aten::mul.Tensor":
        found = [(each, dims) for each in step.arguments if _has_shape_of(each, value)]
    elif step.target in _ATTENTION:
        found = _attended(step, value, dims)
    elif step.target in _POOLS:
        found = [(source, dims)] if source.meta.dim() == 4 and dims == (1,) else []
    elif step.target == "aten::mean.dim":
        found = _averaged(step, source, dims)
    elif step.target in ("aten::pad", "aten::constant_pad_nd"):
        found = _padded(step, source, value, dims)
    elif step.target in ("aten::permute", "aten::transpose.int"):
        found = _permuted(step, source, dims)
    elif step.target in (*VIEWS, "aten::flatten.using_ints"):
        block = _block(source.meta.shape, value.meta.shape, dims)  # type: ignore[union-attr]
        found = [] if block is None else [(source, block)]
    return [each for each in found if sum(each[0] is taken for taken in step.taken) == 1]


def _has_shape_of(each: Any, value: Value) -> bool:
    own: Any = each.meta if isinstance(each, Value) else None
    return own is not None and value.meta is not None and are_same(own.shape, value.meta.shape)


def _attended(step: Step, value: Value, dims: Dims) -> Found:
    """Attention gives a mean of the rows of its third tensor, for each head."""
    third = step.arguments[2]
    metas: Any = (third.meta, value.meta)
    if metas[0] is None or metas[0].dim() != 4 or 2 in dims:
        return []
    alike = all(is_same(metas[0].shape[dim], metas[1].shape[dim]) for dim in dims)
    return [(third, dims)] if alike else []


def _averaged(step: Step, source: Value, dims: Dims) -> Found:
    listed, keeps = step.arguments[1:3]
    if not isinstance(listed, Some):
        return []
    meta: Any = source.meta
    gone = {int(each) % meta.dim() for each in listed.item}
    kept = [dim for dim in range(meta.dim()) if dim not in gone or keeps == "true"]
    found = tuple(kept[dim] for dim in dims)
    return [] if gone.intersection(found) else [(source, found)]


def _padded(step: Step, source: Value, value: Value, dims: Dims) -> Found:
    pairs, meta = zeros_of(step), value.meta
    if pairs is None or meta is None:
        return []
    every = [(0, 0)] * (meta.dim() - len(pairs)) + pairs
    return [(source, dims)] if all(every[dim] == (0, 0) for dim in dims) else []


def _permuted(step: Step, source: Value, dims: Dims) -> Found:
    meta: Any = source.meta
    order = [*range(meta.dim())]
    if step.target == "aten::permute":
        order = [int(each) % meta.dim() for each in step.arguments[1]]
    else:
        first, second = (int(each) % meta.dim() for each in step.arguments[1:3])
        order[first], order[second] = order[second], order[first]
    return [(source, tuple(order[dim] for dim in dims))]


def _block(before: Any, after: Any, dims: Dims) -> Dims | None:
    """The dimensions of a shape whose elements are those along dimensions of another shape."""
    first, last = dims[0], dims[-1]
    if dims != tuple(range(first, last + 1)):
        return None
    wanted = math.prod(after[first : last + 1]), math.prod(after[last + 1 :])
    for end in range(len(before), 0, -1):
        if not is_same(math.prod(before[end:]), wanted[1]):
            continue
        for begin in range(end - 1, -1, -1):
            if is_same(math.prod(before[begin:end]), wanted[0]):
                return tuple(range(begin, end))
    return None
