"""Programs that were quantized elsewhere (QDQ): what rounds to bytes, in one spelling.

torchao and torch.ao write `quantize_per_tensor` and `dequantize_per_channel` of the library
`quantized_decomposed`, or fake quantization; readers of ONNX files often write the formulas. All
become our own two operators where these compute the same, and plain operators elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..program import Argument, Some, Step, Value
from .editor import Editor
from .moves import of_bytes
from .qdq_formulas import number_of, rounded_by_formula, scaled_by_formula
from .quantized import DEQUANTIZE, QUANTIZE
from .quantized_layers import FLOATING
from .quantized_weights import Making

LIBRARY = "quantized_decomposed::"
ROUND_CHANNELS = f"{LIBRARY}quantize_per_channel"
SCALE_CHANNELS = f"{LIBRARY}dequantize_per_channel"
"""Integers with a scale for each channel as numbers: stays until layers have looked at it."""
_RANGE = f"{LIBRARY}choose_qparams.tensor"
_BYTES = (torch.uint8, torch.int8)
_SCALES = 2.0**-100, 2.0**100
"""Between which our operators take scales."""
_Number = float | int | Value


@dataclass(frozen=True)
class Grid:
    """The numbers scale * (integer - zero_point), for integers from least to most of a dtype.

    scale, zero_point: numbers, or tensors where these are not known.
    """

    scale: _Number
    zero_point: _Number
    least: int
    most: int
    dtype: torch.dtype

    @property
    def is_ours(self) -> bool:
        """Whether our operators have such bytes."""
        if self.dtype not in _BYTES or isinstance(self.scale, Value):
            return False
        if isinstance(self.zero_point, Value) or not _SCALES[0] < self.scale < _SCALES[1]:
            return False
        limits = torch.iinfo(self.dtype)
        return limits.min <= self.zero_point <= limits.max


def spelled(editor: Editor) -> None:
    """Write what rounds numbers to bytes, and makes numbers of bytes, in one way."""
    for step in editor.steps.steps:
        if step.target == _RANGE:
            _ranged(editor, step)
            continue
        way = _WAYS.get(step.target)
        if way is None or any(step.results[1:]):
            continue  # a mask, which gradients take
        make = Making(editor.steps.constants)
        made = way(editor, make, step)
        if made is not None:
            _replace(editor, step, make, made)
    editor.apply()
    _of_formulas(editor)


def _replace(editor: Editor, step: Step, make: Making, made: Value) -> None:
    """Put the steps that make a value in the place of one."""
    result = step.results[0]
    assert result is not None
    if not make.steps:
        editor.replace(step)
        editor.redirect(result, made)
        return
    last = make.steps[-1]
    assert last.results == [made]
    make.steps[-1] = replace(last, results=[result])
    editor.replace(step, *make.steps)


def _ranged(editor: Editor, step: Step) -> None:
    """The scale and the zero point that cover what a tensor holds, and zero."""
    x, *bounds, epsilon, _ = step.arguments
    least, most = map(float, bounds)
    make = Making(editor.steps.constants)
    wide, zero = make.to(x, torch.float32), make.constant(0.0)
    low = make("aten::minimum", make("aten::amin", wide, [], "false"), zero)
    high = make("aten::maximum", make("aten::amax", wide, [], "false"), zero)
    width = make("add", high, low, "-1.0")
    scale = make("aten::div.Tensor", width, make.constant(most - least))
    scale = make("aten::maximum", scale, make.constant(float(epsilon)))
    steps = make("aten::round", make("aten::div.Tensor", low, scale))
    place = make("add", make.constant(least), steps, "-1.0")
    for target, bound in zip(_ENDS, (least, most), strict=True):
        place = make(target, place, make.constant(bound))
    for value, result, dtype in zip(
        (scale, place), step.results, ("float64", "int64"), strict=True
    ):
        own = make("aten::_to_copy", value, Some(f"={dtype}"), *["none"] * 3, "false", "none")
        make("aten::reshape", own, ["1"])
        make.steps[-1] = replace(make.steps[-1], results=[result])
    editor.replace(step, *make.steps)


def rest(editor: Editor) -> None:
    """Write what no layer took, with a scale for each channel, in plain operators."""
    for step in editor.steps.steps:
        if step.target == SCALE_CHANNELS:
            make = Making(editor.steps.constants)
            integers, scales, zeros, axis = step.arguments[:4]
            dims = integers.meta.dim()
            made = make("add", make.to(integers, torch.float32),
                        _along(make, _or_zero(make, zeros), axis, dims), "-1.0")  # fmt: skip
            made = make("aten::mul.Tensor", made, _along(make, scales, axis, dims))
            out = _dtype_of(step.arguments[7])
            if out != torch.float32:
                made = make.to(made, out)
            _replace(editor, step, make, made)
    editor.apply()


def _along(make: Making, channels: Value, axis: str, dims: int) -> Value:
    """Numbers of channels in the shape that goes with a tensor, in float32."""
    sizes = [1] * dims
    sizes[int(axis)] = -1
    return make.reshaped(make.to(channels, torch.float32), *sizes)


def _or_zero(make: Making, zeros: Argument) -> Value:
    return zeros.item if isinstance(zeros, Some) else make.constant(0.0)


def _quantized(editor: Editor, make: Making, step: Step) -> Value | None:
    x, *words = step.arguments
    grid = _grid(editor, words[:4], _dtype_of(words[4]))
    return None if grid is None else rounded(make, x, grid)


def _dequantized(editor: Editor, make: Making, step: Step) -> Value | None:
    x, *words = step.arguments
    grid = _grid(editor, words[:4], _dtype_of(words[4]))
    return None if grid is None else scaled(make, x, grid, _dtype_of(words[5]))


def _fake(editor: Editor, make: Making, step: Step) -> Value | None:
    x, scale, zero_point, *switch, least, most = step.arguments
    if switch and number_of(editor, switch[0]) != 1:
        return None
    grid = _grid(editor, [scale, zero_point, least, most], _dtype_between(least, most))
    if grid is None or x.meta is None:
        return None
    return scaled(make, rounded(make, x, grid), grid, x.meta.dtype)


def _channels(editor: Editor, make: Making, step: Step) -> Value | None:
    """Numbers to integers with a scale for each channel."""
    x, scales, zeros, axis, least, most = step.arguments[:6]
    if x.meta is None:
        return None
    dtype = _dtype_of(step.arguments[6])
    return _rounded_channels(make, x, (scales, zeros), axis, (int(least), int(most)), dtype)


def _fake_channels(editor: Editor, make: Making, step: Step) -> Value | None:
    x, scales, zeros, axis, least, most = step.arguments
    if x.meta is None or zeros.meta is None or zeros.meta.dtype.is_floating_point:
        return None
    dtype = _dtype_between(least, most)
    bounds = int(least), int(most)
    integers = _rounded_channels(make, x, (scales, zeros), axis, bounds, dtype)
    word, out = (f"={each}".replace("torch.", "") for each in (dtype, x.meta.dtype))
    words = [scales, Some(zeros), axis, least, most, word, Some(out)]
    return make(SCALE_CHANNELS, integers, *words)


def _rounded_channels(
    make: Making,
    x: Value,
    numbers: tuple[Value, Value],
    axis: str,
    bounds: tuple[int, int],
    dtype: torch.dtype,
) -> Value:
    assert x.meta is not None
    scales, zeros = (_along(make, each, axis, x.meta.dim()) for each in numbers)
    made = _by_formula(make, x, make("aten::reciprocal", scales), zeros, bounds, dtype)
    made.meta = of_bytes(x, dtype).meta
    return made


def rounded(make: Making, x: Value, grid: Grid) -> Value:
    """Numbers to integers: round(x / scale) + zero_point, between least and most."""
    bounds = grid.least, grid.most
    if x.meta is None or x.meta.dtype not in FLOATING or not grid.is_ours:
        inverse = _inverse(make, grid.scale)
        made = _by_formula(make, x, inverse, _number(make, grid.zero_point), bounds, grid.dtype)
        if x.meta is not None:
            made.meta = of_bytes(x, grid.dtype).meta
        return made
    name = str(grid.dtype).removeprefix("torch.")
    made = make(QUANTIZE, x, repr(float(grid.scale)), str(grid.zero_point), f'"{name}"')  # type: ignore[arg-type]
    made.meta = of_bytes(x, grid.dtype).meta
    limits = torch.iinfo(grid.dtype)
    for target, bound, end in zip(_ENDS, bounds, (limits.min, limits.max), strict=True):
        if bound != end:
            number = Value()
            make.constants[number] = torch.tensor(bound, dtype=grid.dtype, device="cpu")
            made = make(target, made, number)
            made.meta = of_bytes(x, grid.dtype).meta
    return made


def scaled(make: Making, integers: Value, grid: Grid, out: torch.dtype) -> Value:
    """Integers to numbers: scale * (integer - zero_point)."""
    if grid.is_ours and out in FLOATING:
        name = str(out).removeprefix("torch.")
        words = [repr(float(grid.scale)), str(grid.zero_point), f'"{name}"']  # type: ignore[arg-type]
        return make(DEQUANTIZE, integers, *words)
    made = make("add", make.to(integers, out), _number(make, grid.zero_point), "-1.0")
    return make("aten::mul.Tensor", made, _number(make, grid.scale))


def _by_formula(
    make: Making,
    x: Value,
    inverse: Value,
    zero: Value,
    bounds: tuple[int, int],
    dtype: torch.dtype,
) -> Value:
    """round(x * inverse) + zero, between bounds, as `dtype`."""
    steps = make("aten::round", make("aten::mul.Tensor", make.to(x, torch.float32), inverse))
    steps = make("add", steps, zero, "1.0")
    for target, bound in zip(_ENDS, bounds, strict=True):
        steps = make(target, steps, make.constant(float(bound)))
    return make.to(steps, dtype)


_ENDS = "aten::maximum", "aten::minimum"


def _number(make: Making, number: _Number) -> Value:
    """A number in float32."""
    if isinstance(number, Value):
        return make.to(number, torch.float32)
    return make.constant(float(number))


def _inverse(make: Making, scale: _Number) -> Value:
    if isinstance(scale, Value):
        return make("aten::reciprocal", _number(make, scale))
    return make.constant(1.0 / scale)


def _grid(editor: Editor, words: list[Any], dtype: torch.dtype) -> Grid | None:
    """The grid that the arguments of a step tell; None where its ends are not known."""
    numbers = [
        number_of(editor, word) if isinstance(word, Value) else float(word) for word in words
    ]
    scale, zero_point, least, most = numbers
    if least is None or most is None:
        return None
    own_scale = words[0] if scale is None else float(scale)
    own_zero = words[1] if zero_point is None else int(zero_point)
    return Grid(own_scale, own_zero, int(least), int(most), dtype)


def _dtype_of(word: Argument) -> torch.dtype:
    """The dtype that a word names; none is float32."""
    if isinstance(word, Some):
        word = word.item
    found: torch.dtype = torch.float32 if word == "none" else getattr(torch, word.strip("="))
    return found


def _dtype_between(least: str, most: str) -> torch.dtype:
    """The dtype of integers of fake quantization."""
    for dtype in (torch.uint8, torch.int8):
        limits = torch.iinfo(dtype)
        if limits.min <= int(least) and int(most) <= limits.max:
            return dtype
    return torch.int32


def _of_formulas(editor: Editor) -> None:
    """The same of what is written in plain operators."""
    for step in editor.steps.steps:
        make = Making(editor.steps.constants)
        found = rounded_by_formula(editor, step)
        if found is not None:
            x, numbers, dtype = found
            grid = Grid(*numbers, dtype)
            if grid.is_ours and x.meta is not None and x.meta.dtype in FLOATING:
                _replace(editor, step, make, rounded(make, x, grid))
    editor.apply()
    for step in editor.steps.steps:
        make = Making(editor.steps.constants)
        other = scaled_by_formula(editor, step)
        if other is None:
            continue
        integers, scale, zero, axis, out = other
        dtype = integers.meta.dtype  # type: ignore[union-attr]
        limits = torch.iinfo(dtype)
        if axis is None:
            grid = Grid(scale, zero, limits.min, limits.max, dtype)
            if grid.is_ours:
                _replace(editor, step, make, scaled(make, integers, grid, out))
        else:
            word, name = (f"={each}".replace("torch.", "") for each in (dtype, out))
            flat = [make.reshaped(each, -1) for each in (scale, zero) if isinstance(each, Value)]
            zeros = Some(flat[1]) if len(flat) > 1 else "none"
            ends = str(limits.min), str(limits.max)
            made = make(SCALE_CHANNELS, integers, flat[0], zeros, axis, *ends, word, Some(name))
            _replace(editor, step, make, made)
    editor.apply()


_Way = Callable[[Editor, Making, Step], Value | None]
_WAYS: dict[str, _Way] = {
    **{f"{LIBRARY}quantize_per_tensor{end}": _quantized for end in ("", ".tensor", ".tensor2")},
    **{f"{LIBRARY}dequantize_per_tensor{end}": _dequantized for end in ("", ".tensor", ".tensor2")},
    ROUND_CHANNELS: _channels,
    "aten::fake_quantize_per_tensor_affine": _fake,
    "aten::fake_quantize_per_tensor_affine.tensor_qparams": _fake,
    "aten::fake_quantize_per_tensor_affine_cachemask": _fake,
    "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _fake,
    "aten::fake_quantize_per_channel_affine": _fake_channels,
    "aten::fake_quantize_per_channel_affine_cachemask": _fake_channels,
}
