"""Pass `pack`: linear and convolution weights in panels or oneDNN's order, once and for all.

The plain copy is dropped: the parameter itself becomes a packed tensor, which is the plain one to
everything but the kernel. A weight that an embedding shares keeps its plain values too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...core.packed import PackedTensor, why_not_plain
from ...core.placement import note_freed
from ...core.watched import is_parameter
from ...graph.formats import ModelForward, has_other_order, is_last
from ...graph.forward import with_parameters
from ...graph.patterns import is_packable_convolution
from ...graph.recognize import convolution_of_module
from ...ops.convolution import Geometry, PackedConvolutionWeight
from ...ops.linear import PackedLinearWeight, can_lie_in_panels, supports
from ...program.passes import convolution_times
from ...program.passes import linear as products
from ...program.passes.convolution_times import Convolution
from ...program.passes.panels import beats_packed
from ...rewriting import measure
from ...rewriting.measure import (
    NO_LOSS,
    Calls,
    Product,
    about,
    calls_of,
    fewer_rows,
    first_win,
    key_of_linear,
    may_stay_beside,
    numbers,
    rows_of,
    wins_of,
)
from ..context import OptimizeContext
from .cast import cast_input, short_name
from .packed_layers import ConvolutionForward, LinearForward, PackedForward, forward_kind

SMALLEST_LINEAR = 4 << 10
"""Elements of a float32 linear weight below which layers are not timed: a few microseconds a call
are saved there. With 0 every weight is packed, also where it does not pay."""

HELD_ELSEWHERE = (
    "its memory is that of another tensor too, through which writes would be lost; inplace=False "
    "packs a copy"
)

MOST_BESIDE = 4 << 20
"""Bytes of a weight that is kept plain beside the packed one."""


def refusal(context: OptimizeContext, module: nn.Module) -> str | None:
    """Return why a module's weight cannot be packed, or None if it can."""
    if not (is_packable_convolution(module) or context.recognizer.linear(module) is not None):
        return "has no packed form"
    weight = module._parameters.get("weight")
    reason = why_not_plain(weight)
    if reason is not None:
        return reason
    assert weight is not None
    if _is_held_elsewhere(context, module):
        return HELD_ELSEWHERE
    dtype = context.target_dtype(module, weight)
    if is_packable_convolution(module):
        size = context.observed.input_sizes.get(module)
        if size is None:
            return "the size of its input is not known; give sample_input"
        if len(size) != weight.dim() or 0 in size:
            return "its input has no batch or is empty"
    small = not is_packable_convolution(module) and weight.numel() < SMALLEST_LINEAR
    if small and dtype == torch.float32 and module not in context.folds:
        return f"{weight.numel()} weights are too few to gain"
    for owner, name in context.owners.get(id(weight), []):
        if owner is not module and (type(owner) is not type(module) or name != "weight"):
            return f"its weight is shared with {context.paths[owner]}, which is no such layer"
    return supports(dtype)


def _is_held_elsewhere(context: OptimizeContext, module: nn.Module) -> bool:
    """Whether what the packed weight of a layer is made of may be written to unseen."""
    folded = context.folds.get(module)
    norm = None if folded is None else folded.norm
    return context.is_held_elsewhere(module) or (
        norm is not None and context.is_held_elsewhere(norm)
    )


def run(context: OptimizeContext) -> None:
    for module in context.open_modules():
        if not (is_packable_convolution(module) or context.recognizer.linear(module) is not None):
            continue
        beside = can_pack_beside(context, module)
        reason = (
            None if beside and not _is_held_elsewhere(context, module) else refusal(context, module)
        )
        if reason is None:
            reason = _pack(context, module, beside)
        if reason is None:
            continue
        if not _is_packed(module):
            cast_plain(context, module)
            context.skipped("pack", module, f"{type(module).__name__}: {reason}")
    model = context.model
    convolutions = (m for m in context.open_modules() if is_packable_convolution(m))
    if any(_is_packed(m) and m is not model for m in convolutions) and model not in context.closed:
        context.log.set_forward(model, ModelForward(model, *is_order_free(context)))


def is_order_free(context: OptimizeContext) -> tuple[bool, bool]:
    """Whether convolutions may return what order they like, since the model's code does not ask
    for it and its outputs are in torch's: in calls with inputs in torch's order, and in calls with
    an input in channels-last order, which may return such an output."""
    run = context.run
    if run is None or run.reads_strides:
        return False, False
    call = run.calls[0]
    if any(map(is_last, _plain(call.given))):
        return False, True  # what outputs are of other inputs was not seen
    is_free = not any(map(has_other_order, _plain(run.values_of(call.outer_output))))
    return is_free, is_free


def _plain(nested: Any) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves(nested):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            yield leaf


def _is_packed(module: nn.Module) -> bool:
    return isinstance(module._parameters.get("weight"), PackedTensor)


def _pack(context: OptimizeContext, module: nn.Module, beside: bool) -> str | None:
    """Pack a weight, or return the reason why not."""
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    dtype, before = context.target_dtype(module, weight), weight.dtype
    packed = packed_weight(context, module, weight.detach(), dtype)
    kind, values = forward_kind(module), weight.detach().to(dtype)
    pays = _pays(context, module, values, packed, kind)
    taken: PackedTensor | None = packed if pays else None
    if isinstance(packed, PackedLinearWeight):
        taken = _with_panels(context, module, values, packed if pays else None)
    if taken is None:
        return "torch's own is as fast here"
    packed = taken
    del values, taken
    if beside:
        packed.cell.keeps_plain, packed.cell.plain = True, weight.detach()
    owners = [owner for owner, _ in context.owners[id(weight)]]
    is_met_by_others = beside and bool(context.dtype_of)
    converts = {owner for owner in owners if context.is_converted(owner) or is_met_by_others}
    context.set_parameter(module, "weight", packed.as_parameter(weight.requires_grad))
    for owner in owners:
        context.log.prepare_for_packed(owner)
        if type(owner) is nn.Embedding:
            continue
        if bias is not None and owner._parameters["bias"].dtype != dtype:  # type: ignore[union-attr]
            _cast_bias(context, owner, dtype)
        context.log.set_forward(owner, kind(owner, owner in converts))
    bytes_of_plain = weight.nbytes
    del weight
    note_freed(bytes_of_plain)
    detail = "" if dtype == before else f" as {str(dtype).removeprefix('torch.')}"
    what = "the weight that an embedding shares" if beside else _beside(packed)
    if what:
        detail += f", second copy: {what}, +{bytes_of_plain / 2**20:.1f} MiB each"
    for owner in owners:
        context.applied("pack", owner, f"{type(owner).__name__}{detail}")
    return None


def _pays(
    context: OptimizeContext,
    module: nn.Module,
    weight: torch.Tensor,
    packed: PackedTensor,
    kind: type[PackedForward],
) -> bool:
    """Whether the packed layer is faster than torch's own on inputs like the sample's.

    Without a sample it may be so for all but few rows: the plain values of a small layer then stay
    beside it.
    """
    size = context.observed.input_sizes.get(module)
    stock, ours = stand_in(module, weight), stand_in(module, packed)
    own, forward = type(module).forward, kind(ours)
    if isinstance(packed, PackedConvolutionWeight):
        assert size is not None
        if len(size) > 3:
            layer = like_program(packed.geometry, size, packed)
            return convolution_times.is_faster(layer, "packed", "plain")
        channels, kernel = tuple(map(about, weight.shape[:2])), tuple(weight.shape[2:])
        key: tuple[Any, ...] = (type(module), type(packed), channels, kernel, weight.dtype)
        x = numbers(*size).to(weight.dtype)
        both: Calls = (lambda: own(stock, x), amid_packed(x, forward))
        geometry = replace(packed.geometry, groups=about(packed.geometry.groups)[0])
        return first_win((*key, geometry, tuple(map(about, size))), [both]) is not None
    assert isinstance(packed, PackedLinearWeight)
    rows = rows_of(size, weight.numel())
    width = weight.shape[0 if packed.transposed else 1]
    calls = calls_of(lambda: (partial(own, stock), forward), width, size, weight.dtype)
    dims = None if size is None else len(size)
    key = (*key_of_linear(weight, packed.transposed, dims), packed.in_panels)
    if size is not None and _is_as_in_program(weight, packed.transposed):
        way = products.panels_call if packed.in_panels else products.packed_call
        if not products.is_faster(*_metas(size, weight), way, products.plain_call):
            return False
        _leave_fewer_rows(packed, weight, key, rows[0], calls)
        return True
    first = first_win((*key, rows), [calls(count) for count in rows])
    if first is None:
        return False
    if size is not None:
        _leave_fewer_rows(packed, weight, key, rows[0], calls)
        return True
    if first and (first > 1 or weight.nbytes > MOST_BESIDE):
        return False
    if first:
        packed.keep_plain_below(rows[first], weight)
        return may_stay_beside((*key, rows, first), calls(rows[0]))
    return True


def _with_panels(
    context: OptimizeContext,
    module: nn.Module,
    weight: torch.Tensor,
    usual: PackedLinearWeight | None,
) -> PackedLinearWeight | None:
    """The weight that a layer gets whose number of rows is not known, of what was chosen without a
    look at panels for few rows alone: oneDNN wakes all threads for a product of one row, which
    panels need none for, though it may be faster with many.

    usual: in which form it is faster than torch's own; None for torch's own.
    """
    size = context.observed.input_sizes.get(module)
    is_in_panels = usual is not None and usual.in_panels
    is_open = size is None and measure.TIMED and not is_in_panels
    if not is_open or not can_lie_in_panels(weight.dtype) or weight.nbytes > MOST_BESIDE:
        return usual
    form = context.recognizer.linear(module)
    assert form is not None
    rows = rows_of(None, weight.numel())

    @cache
    def in_panels() -> PackedLinearWeight:
        return PackedLinearWeight(weight, transposed=form.transposed, in_panels=True)

    def both() -> list[Product]:
        panels = LinearForward(stand_in(module, in_panels()))
        if usual is None:
            return [partial(type(module).forward, stand_in(module, weight)), panels]
        return [LinearForward(stand_in(module, usual)), panels]

    calls = calls_of(both, weight.shape[0 if form.transposed else 1], None, weight.dtype)
    key = (*key_of_linear(weight, form.transposed, None), True)
    if usual is not None:
        key = ("panels", *key, usual.least_rows)
    wins = wins_of((*key, rows), [calls(count) for count in rows])
    if not wins:
        return usual
    found = in_panels()
    if wins < len(rows):
        found.keep_beside_above(rows[wins - 1], weight, usual is not None)
    return found


def _beside(weight: PackedTensor) -> str | None:
    """What a weight keeps beside its packed form, in words."""
    if not isinstance(weight, PackedLinearWeight):
        return None
    if weight.most_rows:
        return f"{'another layout' if weight.has_other_order else 'plain'}, for inputs of many rows"
    return "plain, for inputs of few rows" if weight.least_rows else None


def like_program(own: Geometry, size: tuple[int, ...], weight: torch.Tensor) -> Convolution:
    """A layer as in a program, so that one of both is timed."""
    lists = own.stride, own.padding, own.dilation
    return Convolution(size, tuple(weight.shape), weight.dtype, *lists, own.groups)


def _is_as_in_program(weight: torch.Tensor, transposed: bool) -> bool:
    """Whether a layer takes the time that it takes in a program, so that one of both is timed."""
    return measure.TIMED and not transposed and weight.numel() >= measure.SMALL


def _metas(size: tuple[int, ...], weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An input of a size and a weight without values."""
    return weight.new_empty(size, device="meta"), weight.to("meta")


def _leave_fewer_rows(
    packed: PackedLinearWeight,
    weight: torch.Tensor,
    key: tuple[Any, ...],
    rows: int,
    calls: Callable[[int], Calls],
) -> None:
    """Have calls with fewer rows than the sample's take the plain values of a small weight, where
    these are faster."""
    fewer = fewer_rows(rows)
    if not fewer or weight.nbytes > MOST_BESIDE:
        return
    first = first_win((*key, "fewer", fewer), [calls(count) for count in fewer])
    if first != 0:
        packed.keep_plain_below(rows if first is None else fewer[first], weight)


def stand_in(module: nn.Module, weight: torch.Tensor) -> nn.Module:
    """A module like a layer, with other values of its weight's dtype, to be timed."""
    bias = module._parameters.get("bias")
    parameters: dict[str, Any] = {**module._parameters, "weight": weight}
    if bias is not None:
        # A layer with another kind of bias would run its own code.
        parameters["bias"] = nn.Parameter(bias.detach().to(weight.dtype), requires_grad=False)
    return with_parameters(module, parameters)  # type: ignore[no-any-return]


def amid_packed(
    x: torch.Tensor, forward: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """A packed layer's call on x as most find it: of convolutions in two dimensions and more from
    one in channels-last order to the next, in one dimension with torch's order before and after."""
    if not isinstance(forward, ConvolutionForward):
        return lambda: forward(x)
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if order is None:
        return lambda: forward(x).contiguous()
    last = x.contiguous(memory_format=order)
    return lambda: forward(last)


def cast_plain(context: OptimizeContext, module: nn.Module) -> None:
    """Give a layer that is left alone the dtype that packing would have given it."""
    if not context.converts(module):
        return
    for name, parameter in [*module._parameters.items()]:
        dtype = context.dtype_of[module]
        if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
            converted = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
            context.set_parameter(module, name, converted)
    context.log.set_forward(module, cast_input(module))
    context.applied(
        "cast", module, f"{type(module).__name__} to {short_name(context.dtype_of[module])}"
    )


def packed_weight(
    context: OptimizeContext, module: nn.Module, weight: torch.Tensor, dtype: torch.dtype
) -> PackedTensor:
    form = context.recognizer.linear(module)
    if form is not None:
        in_panels = _is_faster_in_panels(context, module, weight, dtype, form.transposed)
        return PackedLinearWeight(
            weight, dtype=dtype, transposed=form.transposed, in_panels=in_panels
        )
    geometry = convolution_of_module(module)
    assert geometry is not None
    size = context.observed.input_sizes.get(module)
    return PackedConvolutionWeight(weight, geometry, dtype=dtype, input_size=size)


def _is_faster_in_panels(
    context: OptimizeContext,
    module: nn.Module,
    weight: torch.Tensor,
    dtype: torch.dtype,
    transposed: bool,
) -> bool | None:
    """Whether a linear layer is no slower in panels than in oneDNN's order on inputs like the
    sample's; None where that is not known."""
    size = context.observed.input_sizes.get(module)
    if size is None or not measure.TIMED or not can_lie_in_panels(dtype):
        return None
    if _is_as_in_program(weight, transposed) and not products.why_not_packed(weight):
        x, like = _metas(size, weight.to(device="meta", dtype=dtype))
        return beats_packed(x, like)
    (rows,) = rows_of(size, weight.numel())

    def both() -> list[Product]:
        weights = (
            PackedLinearWeight(weight, dtype=dtype, transposed=transposed, in_panels=in_panels)
            for in_panels in (False, True)
        )
        return [LinearForward(stand_in(module, packed)) for packed in weights]

    calls = calls_of(both, weight.shape[0 if transposed else 1], size, dtype)
    key = key_of_linear(weight, transposed, len(size))
    return first_win(("layouts", *key, dtype, rows), [calls(rows)], gain=NO_LOSS) is not None


def _cast_bias(context: OptimizeContext, module: nn.Module, dtype: torch.dtype) -> None:
    bias = module._parameters["bias"]
    assert bias is not None
    context.set_parameter(module, "bias", nn.Parameter(bias.detach().to(dtype), bias.requires_grad))


def can_pack_beside(context: OptimizeContext, module: nn.Module) -> bool:
    """Whether a linear layer shares its weight with an embedding, which reads rows of it."""
    weight = module._parameters.get("weight")
    if type(module) is not nn.Linear or not is_parameter(weight):
        return False
    owners = [owner for owner, _ in context.owners.get(id(weight), []) if owner is not module]
    return (
        any(type(owner) is nn.Embedding for owner in owners)
        and all(type(owner) in (nn.Linear, nn.Embedding) for owner in owners)
        and not context.converts(module)
        and weight.device.type == "cpu"
        and weight.numel() >= SMALLEST_LINEAR
        and supports(weight.dtype) is None
    )
