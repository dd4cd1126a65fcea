"""Views of split weights in the code of a model's author.

Beside tensors of 16 bits such a view is the upper half, as the weight is; to all else it is
float32, and what is written to it reaches both halves of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ops.optimizer_step import formats
from . import sharding
from .leaves import leaves, mapped
from .master_weight import as_plain, plainly
from .split_contexts import is_whole_alone


class UpperHalf(Tensor):
    """A view of a split weight: bfloat16, the upper half.

    low_bits: the same view of the low half, int16.
    call: what functions of torch do with it, by `split_parameter`.
    """

    low_bits: Tensor
    call: ClassVar[Callable[..., Any]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        with as_plain():
            values: Any = values_of(self)
            return values.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls.call(function, types, args, kwargs or {})


sharding.PLAIN |= {UpperHalf}


class Join(torch.autograd.Function):
    """The float32 values of a split weight, which gets their gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(upper: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.float()


class Rows(torch.autograd.Function):
    """A look-up in the upper half; the gradients of a row that is read often are summed in float32,
    as of a float32 weight: in bfloat16 a sum of many stops growing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(upper: Tensor, ids: Tensor, padding_idx: int, by_frequency: bool) -> Tensor:
        return torch.embedding(upper, ids, padding_idx, by_frequency)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        upper, ids, padding_idx, by_frequency = inputs
        ctx.save_for_backward(ids)
        ctx.save_for_forward(ids)
        ctx.options = upper.shape[0], padding_idx, by_frequency

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        rows, padding_idx, by_frequency = ctx.options
        read, places, counts = ids.reshape(-1).unique(return_inverse=True, return_counts=True)
        own = gradient.reshape(len(places), gradient.shape[-1]).float()
        # Of the rows that were read alone; index_add takes ten times as long.
        sums = torch.ops.aten.embedding_dense_backward(own, places, len(read), -1, False)
        if by_frequency:
            sums = sums / counts[:, None]
        if padding_idx >= 0:
            sums = sums.masked_fill((read == padding_idx)[:, None], 0)
        whole = gradient.new_zeros(rows, own.shape[1])
        whole.index_copy_(0, read, sums.to(gradient.dtype))
        return whole, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (ids,) = ctx.saved_tensors
        return torch.embedding(tangent, ids)


def looked_up(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """Rows of a split weight, as `torch.nn.functional.embedding`; None where it is not trained, or
    its gradients are sparse."""
    if sparse or not isinstance(input, Tensor):
        return None
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return None
    place = -1 if padding_idx is None else padding_idx % weight.shape[0]
    with as_plain():
        upper = weight.as_subclass(Tensor)
        return Rows.apply(upper, input, place, scale_grad_by_freq)  # type: ignore[no-any-return, no-untyped-call]


class Bags(torch.autograd.Function):
    """Bags of rows of the upper half; gradients of a row are summed in float32, as in `Rows`."""

    @staticmethod
    def forward(ctx: Any, upper: Tensor, ids: Tensor, offsets: Tensor, options: Any) -> Tensor:
        by_frequency, mode, include_last_offset, padding_idx = options
        found, bags, sizes, largest = torch._embedding_bag(
            upper, ids, offsets, by_frequency, mode, False, None, include_last_offset, padding_idx
        )
        ctx.save_for_backward(ids, offsets, bags, sizes, largest)
        ctx.options = upper.shape[0], by_frequency, mode, padding_idx
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ids, offsets, bags, sizes, largest = ctx.saved_tensors
        rows, by_frequency, mode, padding_idx = ctx.options
        read, places = ids.unique(return_inverse=True)
        is_padding = read == padding_idx
        padding = int(is_padding.int().argmax()) if bool(is_padding.any()) else -1
        if mode == _MAX:
            largest = torch.searchsorted(read, largest).where(largest >= 0, largest)
        sums = torch.ops.aten._embedding_bag_backward(
            gradient.float(), places.to(ids.dtype), offsets, bags, sizes, largest, len(read),
            by_frequency, mode, False, None, padding,
        )  # fmt: skip
        whole = gradient.new_zeros(rows, gradient.shape[-1])
        whole.index_copy_(0, read.long(), sums.to(gradient.dtype))
        return whole, None, None, None


_MODES = {"sum": 0, "mean": 1, "max": (_MAX := 2)}


def bags_of(
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor | None:
    """Bags of rows of a split weight, as `torch.nn.functional.embedding_bag`; None where it is not
    trained, or its gradients are sparse or weighed, and for arguments that torch refuses."""
    is_usual = isinstance(input, Tensor) and not input.is_nested and mode in _MODES
    if sparse or per_sample_weights is not None or not is_usual or len(weight.shape) != 2:
        return None
    if not (weight.requires_grad and torch.is_grad_enabled()) or input.numel() == 0:
        return None
    if scale_grad_by_freq and mode == "max":
        return None
    if input.dim() == 2 and offsets is None:
        width = input.shape[1]
        offsets = torch.arange(0, input.numel(), width, dtype=input.dtype, device=input.device)
        include_last_offset = False
    elif input.dim() != 1 or not isinstance(offsets, Tensor) or offsets.dtype != input.dtype:
        return None
    place = -1 if padding_idx is None else padding_idx % weight.shape[0]
    with as_plain():
        options = scale_grad_by_freq, _MODES[mode], include_last_offset, place
        upper = weight.as_subclass(Tensor)
        return Bags.apply(upper, input.reshape(-1), offsets, options)  # type: ignore[no-any-return, no-untyped-call]


def has_16_bits(value: Any) -> bool:
    """Whether it is a tensor of 16-bit floating-point numbers."""
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def moved(function: Any, upper: Tensor, low_bits: Tensor, rest: Any, kwargs: Any) -> Any:
    """What a function that moves elements makes of both halves: views of them, or a copy, in
    float32 where weights alone are."""
    with as_plain():
        with torch.no_grad():
            lows = function(low_bits, *rest, **kwargs)
        first = lows if isinstance(lows, Tensor) else next(iter(lows), low_bits)
        is_view = first.untyped_storage()._cdata == low_bits.untyped_storage()._cdata
        if not is_view:
            whole = _joined(upper.as_subclass(Tensor), low_bits) if is_whole_alone() else upper
            return function(whole, *rest, **kwargs)
        uppers = function(upper, *rest, **kwargs)
        if isinstance(uppers, Tensor):
            return _view(uppers, lows)
        return type(uppers)(map(_view, uppers, lows))


def _view(upper: Tensor, low_bits: Tensor) -> UpperHalf:
    made = upper.as_subclass(UpperHalf)
    made.low_bits = low_bits
    return made


def values_of(value: UpperHalf) -> Tensor:
    """The float32 values, a new tensor."""
    with as_plain():
        return _joined(value.as_subclass(Tensor), value.low_bits)


def is_whole(value: UpperHalf, parameter: Tensor) -> bool:
    """Whether a view is all of a split parameter, as it lies in memory."""
    with as_plain():
        return (
            value.data_ptr() == parameter.data_ptr()
            and value.shape == parameter.shape
            and value.stride() == parameter.stride()
        )


def _joined(upper: Tensor, low_bits: Tensor) -> Tensor:
    with plainly():
        values = formats.join(upper, low_bits)
    if upper.requires_grad and torch.is_grad_enabled():
        return Join.apply(upper, values)  # type: ignore[no-any-return, no-untyped-call]
    return values


def is_written(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function that writes to its first argument or `out` writes to views."""
    return bool(_written(args, kwargs))


def _written(args: Any, kwargs: dict[str, Any]) -> list[UpperHalf]:
    # Functions of torch.nn.init are handed on with names alone.
    first = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
    found = [*leaves(first), *leaves(kwargs.get("out"))]
    return [own for own in found if isinstance(own, UpperHalf)]


def write(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function that writes to views, on float32 values that then become those of the
    weight."""
    written = _written(args, kwargs)
    if torch.is_grad_enabled() and any(own.requires_grad for own in written):
        with as_plain():
            return function(*args, **kwargs)  # which torch refuses
    with plainly():
        values = {id(own): formats.join(own, own.low_bits) for own in written}

    def given(value: Any) -> Any:
        if id(value) in values:
            return values[id(value)]
        if isinstance(value, UpperHalf):
            return values_of(value)
        return value.float() if has_16_bits(value) else value

    new_args, new_kwargs = mapped(given, (args, kwargs))
    result = function(*new_args, **new_kwargs)
    back = {id(values[id(own)]): own for own in written}
    with plainly():
        for own in written:
            upper, low_bits = formats.split(values[id(own)])
            own.copy_(upper)
            own.low_bits.copy_(low_bits)
    return mapped(lambda own: back.get(id(own), own), result)


def without_views(value: Any) -> Any:
    """What a model returns, views of its weights in it as ordinary tensors."""
    if not any(type(own) is UpperHalf for own in leaves(value)):
        return value
    with as_plain():
        return mapped(lambda own: own.as_subclass(Tensor) if type(own) is UpperHalf else own, value)
