"""Passes that have linear layers and convolutions multiply bytes in place of floating point.

Layers have names, those of the modules whose weights they take. A point is a value of a program
whose range decides which bytes it becomes: what a layer takes, "name.input", and what a layer gives
that is added to something else, "name.output". They are found in the steps as they are before any
pass that times kernels, so that runs on other machines and of other dtypes have the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ...ops.quantized_linear import MOST_PRODUCTS
from ..program import Argument, Some, Step, Value, values_of
from . import panels
from .convolution import changeable, follow_order, padded_input
from .convolution_times import CONVOLUTION
from .editor import VIEWS, Editor, is_contiguous, known
from .linear import LINEAR
from .pooling import largest
from .post_ops import is_activation
from .quantized_layers import Layer, Numbers, Quantization
from .quantized_times import CONVOLUTION_OF_BYTES, LINEAR_OF_BYTES, PANELS, slower, timed
from .quantized_times import QUANTIZE as QUANTIZE
from .quantized_times import RESULT as _RESULT
from .quantized_weights import (
    Making,
    Rounded,
    bytes_of_convolution,
    bytes_of_linear,
    why_not_groups,
    wide_bias,
)

DEQUANTIZE = "oxytorch::dequantize_per_tensor"
FLOATING = (torch.float32, torch.bfloat16, torch.float16)
"""Of what layers take and give where that is no bytes."""
_OTHER = {LINEAR_OF_BYTES: 8, CONVOLUTION_OF_BYTES: 9}
"""The place of what a step adds."""
ADDS = {LINEAR_OF_BYTES: 9, CONVOLUTION_OF_BYTES: 14}
"""The place of the scale of what a step adds, before its zero point."""
SAME_BYTES = (
    *VIEWS, "aten::permute", "aten::transpose.int", "aten::t", "aten::squeeze.dim",
    "aten::unsqueeze", "aten::slice.Tensor", "aten::select.int", "aten::flatten.using_ints",
    "aten::contiguous", "aten::channel_shuffle", "aten::native_channel_shuffle",
)  # fmt: skip
"""Steps whose first result has elements of their first argument: they give bytes of bytes."""


def layers_of(editor: Editor, names: Mapping[Value, str]) -> dict[Step, str]:
    """The linear layers and convolutions that can multiply bytes, with their names.

    A further layer with the same weight is called "name#2" and so on.
    """
    return {step: name for step, name, why in all_layers(editor, names) if not why}


def all_layers(editor: Editor, names: Mapping[Value, str]) -> Iterator[tuple[Step, str, str]]:
    """The linear layers and convolutions with their names, and why they cannot multiply bytes, if
    they cannot."""
    counts: dict[str, int] = {}
    for step in editor.steps.steps:
        if step.target not in (LINEAR, CONVOLUTION) or editor.lasts(step):
            continue
        name = name_of(editor, names, step.arguments[1])
        if name is not None:
            count = counts[name] = counts.get(name, 0) + 1
            yield step, name if count == 1 else f"{name}#{count}", why_not(editor, step)


def name_of(editor: Editor, names: Mapping[Value, str], weight: Argument) -> str | None:
    """The path of the module that has a weight, which may be changed by steps before its layer."""
    value: Argument | None = weight
    while isinstance(value, Value) and value not in names:
        maker = editor.maker.get(value)
        value = None if maker is None else next(values_of(maker.arguments), None)
    if not isinstance(value, Value):
        return None
    path, _, own = names[value].rpartition(".")
    return path or own


def why_not(editor: Editor, step: Step) -> str:
    """Why a layer cannot multiply bytes; empty if it can."""
    x, weight, bias = step.arguments[:3]
    if weight not in editor.lasting or not editor.lasting.issuperset(values_of(bias)):
        return "its weight or bias is computed at each call"
    if weight.meta is None or x.meta is None or known(weight.meta.shape) is None:
        return "shapes of its input and weight are not known"
    if weight.meta.dtype not in FLOATING or x.meta.dtype not in FLOATING:
        return f"it is of {x.meta.dtype}"
    if 0 in weight.meta.shape or 0 in x.meta.shape or not x.meta.dim():
        return "its input or weight is empty"
    if weight.meta[0].numel() > MOST_PRODUCTS:
        return f"it sums more than {MOST_PRODUCTS} products"
    if step.target == LINEAR:
        if weight.meta.dim() != 2 or not is_contiguous(step.results[0]):
            return "its weight is no matrix, or its result does not lie in torch's order"
        return ""
    if step.arguments[6] != "false":
        return "it is transposed"
    if not x.meta.dim() == weight.meta.dim() in (3, 4, 5):
        return "it is of a single image without a batch"
    return why_not_groups(weight.meta.shape, int(step.arguments[8]))


def left(editor: Editor, names: Mapping[Value, str]) -> dict[str, str]:
    """Why layers cannot multiply bytes, by name."""
    return {name: why for _, name, why in all_layers(editor, names) if why}


def points_of(editor: Editor, names: Mapping[Value, str]) -> dict[str, Value]:
    """The values whose ranges decide, by the names of points."""
    found: dict[str, Value] = {}
    for step, name in layers_of(editor, names).items():
        found[f"{name}.input"] = step.arguments[0]
        output = _added(editor, step)
        if output is not None:
            found[f"{name}.output"] = output
    return found


def _added(editor: Editor, step: Step) -> Value | None:
    """What a layer and the activation behind it give, where that is added to something else."""
    (value,) = step.results
    takers = [] if value is None else editor.takers.get(value, [])
    if len(takers) == 1 and is_activation(takers[0]) and value not in editor.outputs:
        (value,) = takers[0].results
    takers = [] if value is None else editor.takers.get(value, [])
    return value if any(taker.target == "add" for taker in takers) else None


def quantize(editor: Editor, quantization: Quantization) -> None:
    """Have the layers that are named multiply bytes, and note which of them seem slower so."""
    layers, found = quantization.layers.by_name, layers_of(editor, quantization.names)
    chosen = {step: layers[name] for step, name in found.items() if name in layers}
    new = {
        step: layer.input is None
        for step, layer in chosen.items()
        if quantization.layers.only_faster and found[step] not in quantization.slower
    }
    times = timed(editor, new)
    by_panels = _change(editor, chosen)
    whys = slower(editor, times, by_panels)
    quantization.slower.update({found[step]: whys.get(step, "") for step in new})


def _change(editor: Editor, chosen: Mapping[Step, Layer]) -> dict[Value, Step]:
    """Have layers multiply bytes; return them by the panels of their weights."""
    outputs: dict[Value, Numbers] = {}
    for step, layer in chosen.items():
        value = _added(editor, step)
        if value is not None and layer.output is not None:
            outputs[value] = layer.output
    found = _replace(editor, chosen)
    join(editor, outputs)
    return found


def join(editor: Editor, outputs: Mapping[Value, Numbers]) -> None:
    """Have layers of bytes compute what follows them, and give each other bytes.

    outputs: the bytes of what is added to something else, where it is rounded for nothing else.
    """
    panels.fuse(editor)
    _add_bytes(editor)
    _move_up(editor)
    _leave_out_pairs(editor)
    _give_bytes(editor, outputs)


def _replace(editor: Editor, chosen: Mapping[Step, Layer]) -> dict[Value, Step]:
    """Put layers of bytes, with floating results, in the place of others, which are returned by
    the panels of their weights."""
    by_panels: dict[Value, Step] = {}
    convolutions = {*changeable(editor, lambda step: "" if step in chosen else "it is not chosen")}
    rounded: dict[tuple[Value, Numbers], Value] = {}
    for step, layer in chosen.items():
        numbers, make = layer.input, Making(editor.steps.constants)
        is_linear = step.target == LINEAR
        x, pads = (step.arguments[0], []) if is_linear else padded_input(editor, step)
        if not is_linear and (numbers is None or step not in convolutions):
            editor.leave(step, "its input has no range, or an output lies in an order of its own")
            continue
        if numbers is not None:
            key = x, numbers
            if key not in rounded:
                rounded[key] = of_bytes(x, numbers.torch_dtype)
                make.steps.append(rounding(x, numbers, rounded[key]))
            x = rounded[key]
        if is_linear:
            made = linear_of_bytes(step, x, numbers, make)
        else:
            assert numbers is not None
            made = convolution_of_bytes(step, x, pads, numbers, make)
        editor.replace(step, *make.steps, made)
        by_panels[made.arguments[PANELS]] = step
    editor.apply()
    if convolutions:
        follow_order(editor)
    return by_panels


def linear_of_bytes(
    step: Step, x: Value, numbers: Numbers | None, make: Making, stored: Rounded | None = None
) -> Step:
    """A linear layer of bytes with a floating result; make: gets what makes its weight.

    numbers: of x; None: x is floating.
    stored: the integers of its weight, where these are given; else what makes them is written too.
    """
    weight, bias = step.arguments[1:3]
    scale: list[Argument] = ["none", "0"]
    if numbers is not None:
        scale = [Some(repr(numbers.scale)), str(numbers.zero_point)]
    arguments = [x, *scale, *bytes_of_linear(make, weight, stored), wide_bias(make, bias)]
    return Step(LINEAR_OF_BYTES, [*arguments, *_BEHIND, *_floating(step)], step.results)


def convolution_of_bytes(
    step: Step,
    x: Value,
    pads: list[str],
    numbers: Numbers,
    make: Making,
    stored: Rounded | None = None,
) -> Step:
    """A convolution of bytes with a floating result; make: gets what makes its weight.

    pads: zeros before and after each spatial dimension.
    stored: as of a linear layer.
    """
    weight, bias, stride, _, dilation, _, _, groups = step.arguments[1:]
    size = weight.meta.shape
    arguments = [
        x,
        repr(numbers.scale),
        str(numbers.zero_point),
        *bytes_of_convolution(make, weight, int(groups), stored),
        [*map(str, size[2:])],
        str(size[0]),
        wide_bias(make, bias),
        "none",
        stride,
        pads,
        dilation,
        groups,
    ]
    return Step(CONVOLUTION_OF_BYTES, [*arguments, *_BEHIND[1:], *_floating(step)], step.results)


_BEHIND: tuple[Argument, ...] = ("none", "none", "0", '"none"')
"""Of a layer that adds nothing: other with its scale and zero point, and the epilogue."""


def _floating(step: Step) -> list[Argument]:
    """The arguments that tell a floating result."""
    meta: Any = step.arguments[1].meta
    return [f'"{meta.dtype}"'.replace("torch.", ""), "none", "0"]


def of_bytes(value: Value, dtype: torch.dtype) -> Value:
    """A value of bytes in the shape and order of another one."""
    meta = value.meta
    if meta is None:
        return Value()
    return Value(meta=meta.new_empty_strided(meta.shape, meta.stride(), dtype=dtype))


def _words(numbers: Numbers) -> list[Argument]:
    return [repr(numbers.scale), str(numbers.zero_point), f'"{numbers.dtype}"']


def rounding(x: Value, numbers: Numbers, result: Value) -> Step:
    """The step that makes bytes of numbers."""
    return Step(QUANTIZE, [x, *_words(numbers)], [result])


def _add_bytes(editor: Editor) -> None:
    """Have layers of bytes add bytes as they are, where float32 numbers were made of them."""
    for step in editor.steps.steps:
        place = _OTHER.get(step.target)
        other = None if place is None else step.arguments[place]
        numbers = editor.made_by(other.item, DEQUANTIZE) if isinstance(other, Some) else None
        if place is None or numbers is None or numbers.arguments[3] != '"float32"':
            continue
        x, scale, zero_point, _ = numbers.arguments
        arguments, scale_place = [*step.arguments], ADDS[step.target]
        arguments[place] = Some(x)
        arguments[scale_place : scale_place + 2] = [Some(scale), zero_point]
        editor.replace(step, step.with_arguments(arguments))
    editor.apply()


def _leave_out_pairs(editor: Editor) -> None:
    """Bytes that become float32 numbers and these bytes again are the same."""
    for step in editor.steps.steps:
        if step.target != QUANTIZE:
            continue
        before, (result,) = editor.made_by(step.arguments[0], DEQUANTIZE), step.results
        if before is None or result is None or result in editor.outputs:
            continue
        x, *numbers, out = before.arguments
        is_same_dtype = x.meta is not None and result.meta is not None
        is_same_dtype = is_same_dtype and x.meta.dtype == result.meta.dtype  # type: ignore[union-attr]
        if out == '"float32"' and is_same_dtype and numbers == [*step.arguments[1:3]]:
            editor.redirect(result, x)
    editor.apply()


def _move_up(editor: Editor) -> None:
    """Round before steps whose results have the elements of what they take."""
    moved = True
    while moved:
        moved = False
        for step in editor.steps.steps:
            if step.target == QUANTIZE and not editor.is_changed(step):
                moved |= _moved_up(editor, step)
        editor.apply()


def _moved_up(editor: Editor, step: Step) -> bool:
    x = step.arguments[0]
    maker = editor.maker.get(x)
    if maker is None or editor.is_changed(maker) or editor.only_taker(x) is not step:
        return False
    (result,) = step.results
    rest = step.arguments[1:]
    if is_cast(maker):
        editor.replace(maker)
        editor.replace(step, step.with_arguments([maker.arguments[0], *rest]))
        return True
    if maker.target == "aten::cat":
        parts, makes = [], list[Step]()
        for part in maker.arguments[0]:
            parts.append(_alike(part, step))
            makes.append(Step(QUANTIZE, [part, *rest], [parts[-1]]))
        made = maker.with_arguments([parts, *maker.arguments[1:]])
    elif maker.target in SAME_BYTES and not any(maker.results[1:]):
        source = _alike(maker.arguments[0], step)
        makes = [Step(QUANTIZE, [maker.arguments[0], *rest], [source])]
        made = maker.with_arguments([source, *maker.arguments[1:]])
    elif _is_largest_of_layer(editor, maker):
        source, pooled = _alike(maker.arguments[0], step), largest(maker)
        assert pooled is not None
        makes = [Step(QUANTIZE, [maker.arguments[0], *rest], [source])]
        made = pooled.with_arguments([source, *pooled.arguments[1:]])
    else:
        return False
    editor.replace(maker)
    editor.replace(step, *makes, replace(made, results=[result, *made.results[1:]]))
    return True


def _is_largest_of_layer(editor: Editor, step: Step) -> bool:
    """Whether a step takes the largest values of what a convolution of bytes gives to it alone:
    the largest of numbers, rounded, is the largest of rounded ones."""
    if largest(step) is None or editor.only_taker(step.arguments[0]) is not step:
        return False
    return editor.made_by(step.arguments[0], CONVOLUTION_OF_BYTES) is not None


def is_cast(step: Step) -> bool:
    """Whether a step changes the dtype alone, from one floating dtype to another."""
    if step.target != "aten::_to_copy" or any(word != "none" for word in step.arguments[2:5]):
        return False
    metas = [None if v is None else v.meta for v in (step.arguments[0], step.results[0])]
    return all(meta is not None and meta.dtype in FLOATING for meta in metas)


def _alike(value: Value, step: Step) -> Value:
    """A value of the bytes that a step makes, in the shape of another one."""
    (result,) = step.results
    assert result is not None and result.meta is not None
    return of_bytes(value, result.meta.dtype)


def _give_bytes(editor: Editor, outputs: Mapping[Value, Numbers]) -> None:
    """Have layers give bytes where all that take what they give take bytes."""
    for value in [s.results[0] for s in editor.steps.steps if s.target in _RESULT]:
        if value is None or value in editor.outputs:
            continue
        takers = editor.takers.get(value, [])
        rounding = [taker for taker in takers if taker.target == QUANTIZE]
        adding = [taker for taker in takers if _adds(taker, value)]
        ways = {tuple(each.arguments[1:]) for each in rounding}
        if not takers or len(rounding) + len(adding) < len(takers) or len(ways) > 1:
            continue
        numbers = _numbers(*ways.pop()) if ways else outputs.get(value)
        if numbers is not None:
            _with_bytes(editor, value, numbers, rounding, adding)


def _adds(step: Step, value: Value) -> bool:
    """Whether a layer of bytes adds a value, and takes it for nothing else."""
    place = _OTHER.get(step.target)
    if place is None or sum(each is value for each in step.taken) != 1:
        return False
    other = step.arguments[place]
    return isinstance(other, Some) and other.item is value


def _numbers(scale: str, zero_point: str, dtype: str) -> Numbers:
    return Numbers(float(scale), int(zero_point), dtype.strip('"'))


def _with_bytes(
    editor: Editor, value: Value, numbers: Numbers, rounding: list[Step], adding: list[Step]
) -> None:
    """Have the layer that makes a value make it of bytes, which `rounding` made so far."""
    step = editor.maker[value]
    made = of_bytes(value, numbers.torch_dtype)
    scale, zero_point, dtype = _words(numbers)
    arguments, place = [*step.arguments], _RESULT[step.target]
    arguments[place : place + 3] = [dtype, Some(scale), zero_point]
    editor.replace(step, replace(step, arguments=arguments, results=[made]))
    for each in rounding:
        editor.replace(each)
        assert each.results[0] is not None
        editor.redirect(each.results[0], made)
    for each in adding:
        arguments, place = [*each.arguments], ADDS[each.target]
        arguments[place : place + 2] = [Some(scale), zero_point]
        editor.replace(each, each.with_arguments(arguments))
    editor.redirect(value, made)
    editor.apply()
