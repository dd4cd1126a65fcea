"""Pass that has layers take smaller numbers in some channels and larger ones in their weights.

Layers that multiply bytes have one scale for all channels of what they take: a few huge channels
leave the others few steps. A layer of x / s with the weight w * s, s a factor for each channel,
gives what it gave, and the division goes into what makes x: a normalization or another layer,
which is followed by nothing but steps that let factors through. All of this is done by steps that
depend on lasting values alone, so that it follows writes to them.

Sources: Xiao et al., SmoothQuant, 2022, for linear layers behind normalizations; Nagel et al.,
Data-Free Quantization Through Weight Equalization and Bias Correction, 2019, for convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ...ops.convolution import Geometry as Geometry
from ..program import Argument, Some, Step, Value
from .channels import Dims, before
from .convolution import NORM
from .convolution_times import CONVOLUTION
from .editor import Editor
from .linear import LINEAR
from .quantized import layers_of
from .quantized_layers import Quantization
from .quantized_weights import Making

_ROW_NORMS = {
    "oxytorch::layer_norm": 1,
    "oxytorch::rms_norm": 1,
    "oxytorch::add_layer_norm": 2,
    "oxytorch::add_rms_norm": 2,
}
"""Normalizations of rows, and the place of their weight."""
_BIAS = {"oxytorch::layer_norm": 2, "oxytorch::add_layer_norm": 3, NORM: 2}
"""The place of the bias of normalizations that have one; a batch norm's weight is before it."""


@dataclass(frozen=True)
class Group:
    """Layers that take the same value, by name.

    channels: of the value.
    calls: for each of them its weight, and the geometry of a convolution.
    why: why that value cannot be divided; empty if it can.
    """

    layers: tuple[str, ...]
    channels: int
    calls: tuple[tuple[Value, Geometry | None], ...]
    why: str = ""


@dataclass(frozen=True)
class _Place:
    """A value whose channels can be divided: by a step that makes it, for what takes it.

    takers: the steps that get the divided value.
    is_shared: whether others take it as it is.
    """

    maker: Step
    value: Value
    takers: tuple[Step, ...]
    is_shared: bool


def groups_of(editor: Editor, names: Mapping[Value, str]) -> list[Group]:
    """The layers that can multiply bytes, by what they take."""
    return [
        Group(
            tuple(group.values()),
            _channels(next(iter(group))),
            tuple((step.arguments[1], _geometry(step)) for step in group),
            place if isinstance(place, str) else "",
        )
        for group in _grouped(editor, names)
        for place in [_place(editor, group)]
    ]


def smooth(editor: Editor, quantization: Quantization) -> Quantization:
    """Divide what layers take by their factors, where that can be done here.

    Returns how the layers are computed then: those of smoothed groups take other bytes.
    """
    layers = {**quantization.layers.by_name}
    for wanted in quantization.layers.smoothing:
        if not wanted.factors or layers.keys().isdisjoint(wanted.layers):
            continue
        groups = _grouped(editor, quantization.names)
        group = next((g for g in groups if (*g.values(),) == wanted.layers), {})
        if not group or _channels(next(iter(group))) != len(wanted.factors):
            continue  # layers of another way through the model's code
        place = _place(editor, group)
        if isinstance(place, str):
            editor.leave(next(iter(group)), f"its input is not divided: {place}")
            continue
        _divide(editor, group, place, wanted.factors)
        for name in layers.keys() & {*wanted.layers}:
            if layers[name].input is not None:
                layers[name] = replace(layers[name], input=wanted.input)
    return replace(quantization, layers=replace(quantization.layers, by_name=layers))


def _grouped(editor: Editor, names: Mapping[Value, str]) -> list[dict[Step, str]]:
    """The layers by what they take, each with its name."""
    found: dict[tuple[Value, str], dict[Step, str]] = {}
    for step, name in layers_of(editor, names).items():
        found.setdefault((step.arguments[0], step.target), {})[step] = name
    return [*found.values()]


def _geometry(step: Step) -> Geometry | None:
    if step.target == LINEAR:
        return None
    stride, padding, dilation = (tuple(map(int, each)) for each in step.arguments[3:6])
    return Geometry(stride, padding, dilation, int(step.arguments[8]))


def _channels(step: Step) -> int:
    size: Sequence[int] = step.arguments[1].meta.shape
    return size[1] if step.target == LINEAR else size[1] * int(step.arguments[8])


def _place(editor: Editor, group: Mapping[Step, str]) -> _Place | str:
    """Where what a group takes is divided, or why it cannot be."""
    first = next(iter(group))
    x = first.arguments[0]
    if x.meta is None:
        return "the shape of its input is not known"
    return _source(editor, x, (*group,), (x.meta.dim() - 1 if first.target == LINEAR else 1,))


def _source(editor: Editor, value: Value, takers: tuple[Step, ...], dims: Dims) -> _Place | str:
    """Where a value is divided along dimensions for these takers, or why it cannot be."""
    maker = editor.maker.get(value)
    if maker is None:
        return "its input is one of the model"
    is_shared = value in editor.outputs or any(
        taker not in takers for taker in editor.takers.get(value, ())
    )
    if maker.target in _ROW_NORMS:
        return _of_norm(editor, maker, value, takers, dims, is_shared)
    if is_shared:
        return "something else takes its input too"
    if maker.target in (LINEAR, CONVOLUTION, NORM):
        return _of_layer(editor, maker, value, takers, dims)
    found: _Place | str = f"{maker.target} before it lets no factors through"
    for source, at in before(maker, value, dims):
        found = _source(editor, source, (maker,), at)
        if not isinstance(found, str):
            return found
    return found


def _of_norm(
    editor: Editor, maker: Step, value: Value, takers: tuple[Step, ...], dims: Dims, is_shared: bool
) -> _Place | str:
    assert value.meta is not None
    if value is not maker.results[0] or dims != (value.meta.dim() - 1,):
        return f"{maker.target} before it gives another dimension"
    places = (_ROW_NORMS[maker.target], _BIAS.get(maker.target))
    return _lasting(editor, maker, places) or _Place(maker, value, takers, is_shared)


def _of_layer(
    editor: Editor, maker: Step, value: Value, takers: tuple[Step, ...], dims: Dims
) -> _Place | str:
    assert value.meta is not None
    own = value.meta.dim() - 1 if maker.target == LINEAR else 1
    if value is not maker.results[0] or dims != (own,):
        return f"{maker.target} before it gives another dimension"
    if maker.target == CONVOLUTION and maker.arguments[6] != "false":
        return "a transposed convolution is before it"
    if maker.target == NORM and maker.arguments[1] == "none":
        return f"{maker.target} before it has no weight"
    return _lasting(editor, maker, (1, 2)) or _Place(maker, value, takers, False)


def _lasting(editor: Editor, maker: Step, places: Sequence[int | None]) -> str:
    """Why weight and bias of a step cannot be scaled; empty if they can."""
    given = [maker.arguments[place] for place in places if place is not None]
    values = [each.item if isinstance(each, Some) else each for each in given if each != "none"]
    if not editor.lasting.issuperset(values):
        return f"the weight of {maker.target} before it is computed at each call"
    if any(value.meta is None or not value.meta.is_floating_point() for value in values):
        return f"the dtype of {maker.target} before it is not known"
    return ""


def _divide(
    editor: Editor, group: Mapping[Step, str], place: _Place, factors: Sequence[float]
) -> None:
    """Divide what a group takes, and multiply its weights."""
    factor = Value(meta=torch.empty(len(factors), device="meta"))
    editor.steps.constants[factor] = torch.tensor(factors, device="cpu")
    value = Value(meta=place.value.meta) if place.is_shared else place.value
    _divide_source(editor, place, value, factor)
    for step in dict.fromkeys((*group, *place.takers)):
        arguments = [value if each is place.value else each for each in step.arguments]
        make = Making(editor.steps.constants)
        if step in group:
            arguments[1] = _like(make, _widened(make, step, factor), step.arguments[1])
        editor.replace(step, *make.steps, step.with_arguments(arguments))
    editor.apply()


def _widened(make: Making, step: Step, factor: Value) -> Value:
    """The weight of a layer, with its inputs multiplied by factors."""
    weight = step.arguments[1]
    wide = make.to(weight, torch.float32)
    if step.target == LINEAR:
        return make("aten::mul.Tensor", wide, factor)
    outputs, inputs, *kernel = weight.meta.shape
    groups, ones = int(step.arguments[8]), [1] * len(kernel)
    parts = make.reshaped(wide, groups, outputs // groups, inputs, *kernel)
    product = make("aten::mul.Tensor", parts, make.reshaped(factor, groups, 1, inputs, *ones))
    return make.reshaped(product, outputs, inputs, *kernel)


def _like(make: Making, value: Value, other: Value) -> Value:
    """A value of float32 in the dtype of another one."""
    assert other.meta is not None
    found = value
    if other.meta.dtype != torch.float32:
        word = Some(f"={other.meta.dtype}".replace("torch.", ""))
        found = make("aten::_to_copy", value, word, *["none"] * 3, "false", "none")
    found.meta = other.meta
    return found


def _divide_source(editor: Editor, place: _Place, value: Value, factor: Value) -> None:
    """Have a step make a value divided by factors; where that is another one than it makes, a
    second normalization does, of the sum that the first one is of."""
    make, maker = Making(editor.steps.constants), place.maker
    divided = _divided(make, maker, factor)
    if not place.is_shared:
        editor.replace(maker, *make.steps, maker.with_arguments(divided))
        return
    first, x = maker, divided[0]
    if _ROW_NORMS[maker.target] == 2:
        result, total = maker.results
        x = Value(meta=value.meta) if total is None else total
        first = replace(maker, arguments=[*maker.arguments[:-1], "true"], results=[result, x])
        divided = [x, *divided[2:-1]]
    target = maker.target.replace("add_", "")
    editor.replace(maker, first, *make.steps, Step(target, divided, [value]))


def _divided(make: Making, maker: Step, factor: Value) -> list[Argument]:
    """The arguments of a step whose results are divided by factors."""
    arguments = [*maker.arguments]
    if maker.target in (LINEAR, CONVOLUTION):
        weight, bias = arguments[1:3]
        ones = [1] * (weight.meta.dim() - 1)
        wide = make.to(weight, torch.float32)
        quotient = make("aten::div.Tensor", wide, make.reshaped(factor, -1, *ones))
        arguments[1] = _like(make, quotient, weight)
        if isinstance(bias, Some):
            wide = make.to(bias.item, torch.float32)
            quotient = make("aten::div.Tensor", wide, factor)
            arguments[2] = Some(_like(make, quotient, bias.item))
        return arguments
    places = (_ROW_NORMS.get(maker.target, 1), _BIAS.get(maker.target))
    for place in places:
        own = None if place is None else arguments[place]
        if isinstance(own, Some):
            quotient = make("aten::div.Tensor", make.to(own.item, torch.float32), factor)
            if maker.target == NORM:
                quotient = _like(make, quotient, own.item)
            arguments[place] = Some(quotient)  # type: ignore[index]
        elif place == places[0]:
            arguments[place] = Some(make("aten::reciprocal", factor))
    return arguments
