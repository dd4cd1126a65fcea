"""Which linear layers and convolutions get the dtype asked for: those that are no slower in it.

Processors differ: one without products of bfloat16 takes several times as long as in float32, one
with AMX has no fast bfloat16 convolution of three channels or of a single position. So a layer of
each size is timed in both dtypes, on what the sample shows or on a usual input. A layer that keeps
its dtype among converted ones converts its input and its output, so only what is much slower does.
Where nothing is gained by all that, no layer is converted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ... import isa
from ...core.packed import why_not_plain
from ...graph.boundary import Boundary, BoundaryForward
from ...graph.patterns import is_packable_convolution
from ...graph.recognize import convolution_of_module
from ...program.passes.convolution_times import LEAVING, Convolution, seconds_plain, times_of
from ...rewriting import measure
from ...rewriting.measure import about, numbers
from ..context import OptimizeContext
from . import cast, pack
from .packed_layers import forward_kind

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
USUAL_SIDES = {1: (1024, 512, 256, 128, 64), 2: (56, 28, 14, 7), 3: (16, 8, 4)}
"""Sides of the inputs of convolutions that are timed where no sample tells, by dimensions: the
largest with at most so many elements and products."""
MOST_ELEMENTS, MOST_PRODUCTS = 1 << 19, 1 << 27
FIRST_CHANNELS, FIRST_SIDE = 4, {1: 16_000, 2: 224, 3: 32}
"""Channels up to which a convolution is taken for a network's first, unless its kernel has a single
element as those that scale channels have, and the side of its input."""
USUAL_ROWS, MOST_ROWS, FEW_PRODUCTS = 128, 1024, 1 << 22
"""Rows of the input of a linear layer, and more of a small one, up to so many products: such layers
have many, as the first ones of vision models."""

CLEAR, CLEAR_OF_GUESSES = 2.0, 3.0
"""How many times as long as a layer that keeps its dtype among others a converted one has to take:
changes of dtype cost more inside a model than here, and inputs may be of other sizes. The last is
for convolutions whose inputs' size is a guess, but for a network's first one."""
GAIN_OF_LINEAR, GAIN_OF_CONVOLUTIONS = 1.05, 1.0
GAIN_OF_BATCHES, GAIN_OF_BATCHES_IN_TILES, FEW_THREADS = 1.1, 1.2, 4
"""How many times as fast the layers have to be together in their own dtype for all to keep it. What
stands around linear layers (attention, activations) gains by a narrow dtype too, while what stands
around convolutions does not. The others are for convolutions of an unknown batch, which are timed
with one image of a usual size: where a narrow dtype loses a twentieth with one, it gains a fifth
with eight. With tiles those of MobileNetV2 lose a tenth by these times, while the model gains as
much; those of EfficientNet lose a quarter, and the model a twentieth. With more threads than
FEW_THREADS both lose a seventh, as by these times, and gain less with eight (docs/zoo.md)."""

Times = tuple[float, ...]
"""Seconds in the own dtype, in it among converted layers, and in the dtype asked for: as it is and,
where a layer may be packed, packed."""


def choose(context: OptimizeContext) -> None:
    """Have the layers converted that are as fast so, and the other ones not."""
    if not measure.TIMED:
        return
    layers = candidates(context)
    gains = [_gain_of(context, layer) for layer in layers]
    clears = [_clear_of(context, layer) for layer in layers]
    times = [_times(context, layer) for layer in layers]
    plain = slower([each[:3] for each in times], gains, clears)
    kept = slower(times, gains, clears) if "pack" in context.passes else plain
    context.packing_decides = kept != plain
    leave(context, {layers[number] for number in kept})
    if len(kept) == len(layers) > 0:
        _leave_the_rest(context)


def _gain_of(context: OptimizeContext, layer: nn.Module) -> float:
    if context.recognizer.linear(layer) is not None:
        return GAIN_OF_LINEAR
    if layer in context.observed.input_sizes:
        return GAIN_OF_CONVOLUTIONS
    is_few = torch.get_num_threads() <= FEW_THREADS
    return GAIN_OF_BATCHES_IN_TILES if isa.has("tiles") and is_few else GAIN_OF_BATCHES


def _clear_of(context: OptimizeContext, layer: nn.Module) -> float:
    is_known = context.recognizer.linear(layer) is not None or layer in context.observed.input_sizes
    return CLEAR if is_known or _is_first(layer) else CLEAR_OF_GUESSES


def slower(times: Sequence[Times], gains: Sequence[float], clears: Sequence[float]) -> set[int]:
    """The numbers of the layers that are too slow in the dtype asked for.

    gains: how many times as fast each counts to have to be in its own dtype.
    clears: how many times as long as in its own dtype, among others, each has to take to keep it.
    """
    # Times have noise: among converted layers none is faster than alone.
    among = [max(own, between) for own, between, *_ in times]
    fastest = [min(converted) for _, _, *converted in times]
    kept = {n for n, converted in enumerate(fastest) if converted > among[n] * clears[n]}
    mixed = sum(among[n] if n in kept else converted for n, converted in enumerate(fastest))
    unconverted = sum(own * gain for (own, *_), gain in zip(times, gains, strict=True))
    return {*range(len(times))} if unconverted <= mixed else kept


def candidates(context: OptimizeContext) -> list[nn.Module]:
    """The linear layers and convolutions to be converted that no key names: a layer that one names
    is converted whatever that costs. Nor those that share a weight with a module of another kind,
    which hands it to other code."""
    return [
        module
        for module in filter(context.converts, context.open_modules())
        if module not in context.of_integers
        and _is_timed(context, module)
        and not cast.are_named(context, [module])
        and not _is_shared(context, module)
    ]


def leave(context: OptimizeContext, kept: set[nn.Module]) -> None:
    """Leave layers in their dtype that are slower in the other one."""
    in_order = [module for module in context.paths if module in kept]
    for module in in_order:
        own = cast.short_name(_own(module))
        context.skipped("cast", module, f"{type(module).__name__}: {own} is faster here")
    context.slower |= {module: context.dtype_of[module] for module in in_order}
    context.leave_dtype(kept)


def _leave_the_rest(context: OptimizeContext) -> None:
    """Leave what would be converted for the sake of the layers around it."""
    rest = [
        module
        for module in filter(context.converts, context.open_modules())
        if not isinstance(module, nn.RNNBase | nn.RNNCellBase)
        and not cast.are_named(context, [module])
    ]
    for module in rest:
        kind = type(module).__name__
        context.skipped("cast", module, f"{kind}: no layer around it is converted")
    context.leave_dtype({*rest})


def _is_shared(context: OptimizeContext, module: nn.Module) -> bool:
    owners = context.owners.get(id(module._parameters["weight"]), [])
    return any(type(owner) is not type(module) for owner, _ in owners)


def _is_timed(context: OptimizeContext, module: nn.Module) -> bool:
    """Whether a module is a layer whose time its weight and its input decide."""
    is_convolution = is_packable_convolution(module) or type(module) in CONVOLUTIONS
    if not (is_convolution or context.recognizer.linear(module) is not None):
        return False
    return why_not_plain(module._parameters.get("weight")) is None


def _own(module: nn.Module) -> torch.dtype:
    return module._parameters["weight"].dtype  # type: ignore[union-attr]


def _times(context: OptimizeContext, module: nn.Module) -> Times:
    """The times of a layer of about this size."""
    weight: Any = module._parameters["weight"]
    weight = weight.detach()
    dtype, own = context.dtype_of[module], weight.dtype
    size = context.observed.input_sizes.get(module)
    is_packed = pack.refusal(context, module) is None
    form = context.recognizer.linear(module)
    geometry = convolution_of_module(module)
    in_program = "program" in context.passes
    if geometry is not None and (weight.dim() > 3 or in_program):
        shape = _size_of(module, weight, size)
        layer = pack.like_program(geometry, shape, weight)
        other = replace(layer, dtype=dtype)
        return _convolution_times(layer, other, is_packed, in_program)
    make, numel, kind = (
        _convolution_input(module, weight, size)
        if form is None
        else _linear_input(weight, size, form.transposed)
    )
    kind += (*map(about, (*weight.shape[:2], numel)), own, dtype, is_packed)
    key = (type(module), *kind)
    return measure.seconds_of(key, lambda: _ways(context, module, weight, make(), is_packed))


_Input = tuple[Callable[[], Tensor], int, tuple[Any, ...]]
"""What makes an input to be timed, its elements, and what else the time depends on."""


def _linear_input(weight: Tensor, size: tuple[int, ...] | None, transposed: bool) -> _Input:
    usual = max(USUAL_ROWS, min(MOST_ROWS, FEW_PRODUCTS // weight.numel()))
    rows = math.prod(size[:-1]) if size else usual
    rows = max(1, min(rows, MOST_PRODUCTS // weight.numel()))
    width = weight.shape[0 if transposed else 1]
    return partial(measure.input_of, rows, width, size), rows * width, ()


def _convolution_times(
    own: Convolution, other: Convolution, is_packed: bool, in_program: bool
) -> Times:
    """The times of a layer that programs compute in the same ways, in both dtypes; in a program an
    operator of ours may be the fastest."""
    ways, plain = times_of(other), seconds_plain(own)
    count = torch.Size(own.size).numel()
    between = _seconds_of_cast(count, other.dtype, own.dtype)
    between += _seconds_of_cast(own.result.numel(), own.dtype, other.dtype)
    if in_program and torch.get_num_threads() > 1:  # both conversions are steps of torch's
        between += 2 * LEAVING
    as_it_is = min(ways["plain"], ways.get("own", math.inf) if in_program else math.inf)
    # oneDNN packs no float16 weights where the processor has no products of them.
    packed = ways.get("packed") if is_packed else None
    converted = [as_it_is] if packed is None else [as_it_is, packed]
    return plain, plain + between, *converted


def _seconds_of_cast(count: int, before: torch.dtype, after: torch.dtype) -> float:
    """Seconds in which so many numbers are converted."""

    def make() -> list[Callable[[], Tensor]]:
        given = numbers(count).to(before)
        return [lambda: given.to(after)]

    return measure.seconds_of(("cast", about(count), before, after), make)[0]


def _size_of(module: Any, weight: Tensor, size: tuple[int, ...] | None) -> tuple[int, ...]:
    known = size is not None and len(size) == weight.dim() and 0 not in size
    return size if size is not None and known else _usual_size(module, weight)


def _convolution_input(module: Any, weight: Tensor, size: tuple[int, ...] | None) -> _Input:
    shape = _size_of(module, weight, size)
    names = ("stride", "padding", "dilation", "output_padding")
    kind = tuple(getattr(module, name, None) for name in names)
    kind += (about(module.groups), *map(about, shape), *weight.shape[2:])
    return partial(numbers, *shape), math.prod(shape), kind


def _ways(
    context: OptimizeContext, module: nn.Module, weight: Tensor, x: Tensor, is_packed: bool
) -> tuple[Callable[[], Any], ...]:
    """Calls of a layer in its own dtype, in it among converted layers, and in the one asked for: as
    it is and, where it may be packed, packed."""
    dtype = context.dtype_of[module]
    stock, x, given = pack.stand_in(module, weight), x.to(weight.dtype), x.to(dtype)
    among = BoundaryForward(stock, Boundary(weight.dtype, returns=dtype))
    converted = cast.cast_input(pack.stand_in(module, weight.to(dtype)))
    calls = (
        partial(type(module).forward, stock, x),
        partial(among, given),
        partial(converted, given),
    )
    if not is_packed:
        return calls
    packed = pack.packed_weight(context, module, weight, dtype)
    forward = forward_kind(module)(pack.stand_in(module, packed))
    return *calls, pack.amid_packed(given, forward)


def _usual_size(module: Any, weight: Tensor) -> tuple[int, ...]:
    """The size of an input that a convolution may have."""
    dims = weight.dim() - 2
    channels, extent = (
        module.in_channels,
        max(
            step * (length - 1) + 1
            for step, length in zip(module.dilation, module.kernel_size, strict=True)
        ),
    )
    if _is_first(module):
        side = FIRST_SIDE[dims]
    else:
        positions = [s**dims for s in USUAL_SIDES[dims]]
        stride = 1 if isinstance(module, TRANSPOSED) else math.prod(module.stride)
        fits = (
            side
            for side, count in zip(USUAL_SIDES[dims], positions, strict=True)
            if channels * count <= MOST_ELEMENTS
            and weight.numel() * count // stride <= MOST_PRODUCTS
        )
        side = next(fits, USUAL_SIDES[dims][-1])
    return (1, channels, *[max(side, extent)] * dims)


def _is_first(module: Any) -> bool:
    """Whether a convolution may be a network's first one."""
    return bool(module.in_channels <= FIRST_CHANNELS and math.prod(module.kernel_size) > 1)
