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

from ...ops.quantized_linear import MOST_PRODUCTS
from ..program import Argument, Some, Step, Value, values_of
from . import panels
from .convolution import changeable, follow_order, padded_input
from .convolution_times import CONVOLUTION
from .editor import Editor, is_contiguous, known
from .linear import LINEAR
from .moves import OTHER, adds, as_numbers, groups_of_moved, move, of_bytes, with_added_bytes
from .post_ops import is_activation
from .quantized_layers import FLOATING, Layer, Numbers, Quantization
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
NO_INPUT = "its input is empty"
"""Why a layer cannot multiply bytes in some calls."""


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
    if 0 in x.meta.shape:
        return NO_INPUT
    if 0 in weight.meta.shape or not x.meta.dim():
        return "its weight is empty, or its input has no dimension"
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


def shared_points(editor: Editor, names: Mapping[Value, str]) -> list[tuple[str, ...]]:
    """The points of values that share elements by steps that move these, and that a layer makes.

    Where their bytes stand for the same numbers, the layer can give bytes.
    """
    points, layers = points_of(editor, names), layers_of(editor, names)
    made = {value for step in layers for value in step.results}
    made |= {
        s.results[0] for s in editor.steps.steps if is_activation(s) and s.arguments[0] in made
    }
    groups = (group for group in groups_of_moved(editor) if not made.isdisjoint(group))
    found = [tuple(name for name, value in points.items() if value in group) for group in groups]
    return [each for each in found if len(each) > 1]


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
    move(editor)
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


def _words(numbers: Numbers) -> list[Argument]:
    return [repr(numbers.scale), str(numbers.zero_point), f'"{numbers.dtype}"']


def rounding(x: Value, numbers: Numbers, result: Value) -> Step:
    """The step that makes bytes of numbers."""
    return Step(QUANTIZE, [x, *_words(numbers)], [result])


def _add_bytes(editor: Editor) -> None:
    """Have layers of bytes add bytes as they are, where float32 numbers were made of them."""
    for step in editor.steps.steps:
        place = OTHER.get(step.target)
        other = None if place is None else step.arguments[place]
        numbers = editor.made_by(other.item, DEQUANTIZE) if isinstance(other, Some) else None
        if place is None or numbers is None or numbers.arguments[3] != '"float32"':
            continue
        x, scale, zero_point, _ = numbers.arguments
        editor.replace(step, with_added_bytes(step, x, scale, zero_point))
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


def _give_bytes(editor: Editor, outputs: Mapping[Value, Numbers]) -> None:
    """Have layers give bytes where all that take what they give take bytes."""
    for value in [s.results[0] for s in editor.steps.steps if s.target in _RESULT]:
        if value is None or value in editor.outputs:
            continue
        takers = editor.takers.get(value, [])
        rounding = [taker for taker in takers if taker.target == QUANTIZE]
        adding = [taker for taker in takers if adds(taker, value)]
        ways = {tuple(each.arguments[1:]) for each in rounding}
        if not takers or len(rounding) + len(adding) < len(takers) or len(ways) > 1:
            continue
        numbers = as_numbers(*ways.pop()) if ways else outputs.get(value)
        if numbers is not None:
            _with_bytes(editor, value, numbers, rounding, adding)


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
        editor.replace(each, with_added_bytes(each, made, scale, zero_point))
    editor.redirect(value, made)
    editor.apply()
