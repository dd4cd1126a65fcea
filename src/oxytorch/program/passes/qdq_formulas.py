"""Rounding to bytes where it is written in plain operators, as readers of ONNX files do.

quantize     to(clamp(round(x / scale) + zero_point, least, most), bytes)
dequantize   (to(bytes, float) - zero_point) * scale
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..program import Argument, Some, Step, Steps, Value
from .editor import Editor

_BYTES = (torch.uint8, torch.int8)
_COPY = "aten::_to_copy"
_Numbers = tuple[float, int, int, int]
_Scaled = tuple[Value, Any, Any, "str | None", torch.dtype]


def known_tensor(editor: Editor, value: Argument) -> Tensor | None:
    """A tensor of a few numbers that constants and known weights tell; None for other values."""
    if not isinstance(value, Value) or value not in editor.lasting:
        return None
    steps = Steps(steps=editor.steps.steps, outputs=[value])
    steps.drop_unused()
    made = {result for step in steps.steps for result in step.results}
    taken = {value, *(each for step in steps.steps for each in step.taken)} - made
    found = {each: editor.tensor(each) for each in taken}
    tensors = {each: tensor for each, tensor in found.items() if tensor is not None}
    if len(tensors) < len(taken) or sum(t.numel() for t in tensors.values()) > _MOST:
        return None
    steps.constants = tensors
    with torch.no_grad():
        return steps.program()([])[0][0] if steps.steps else tensors[value]


_MOST = 1 << 20
"""Numbers of which others are computed to know them."""


def number_of(editor: Editor, value: Argument) -> int | float | None:
    """A number that is known, of one dimension too; None for other values."""
    tensor = known_tensor(editor, value)
    if tensor is None or tensor.numel() != 1 or tensor.dim() > 1:
        return None
    if tensor.dtype == torch.bool or tensor.is_complex():
        return None
    found: int | float = tensor.item()
    return found


def rounded_by_formula(editor: Editor, step: Step) -> tuple[Value, _Numbers, torch.dtype] | None:
    """What a step rounds; scale, zero point, least and largest integer; and the dtype of bytes.

    None for other steps, and where a number is not known.
    """
    dtype, result = _cast_to(step), step.results[0] if step.results else None
    if dtype not in _BYTES or result is None or not _becomes_numbers(editor, result):
        return None
    value = step.arguments[0]
    limits = torch.iinfo(dtype)
    bounds: dict[str, int] = {"aten::maximum": limits.min, "aten::minimum": limits.max}
    seen: set[str] = set()
    while True:
        maker = editor.made_by(value, *bounds)
        if maker is None or maker.target in seen:
            break
        value, number = _and_number(editor, maker)
        if number is None or int(number) != number:
            return None
        bounds[maker.target] = int(number)
        seen.add(maker.target)
    if len(seen) != len(bounds):
        return None  # torch wraps what lies beyond the dtype
    zero, maker = 0, editor.made_by(value, "add")
    if maker is not None and maker.arguments[2] == "1.0":
        value, number = _and_number(editor, maker)
        if number is None or int(number) != number:
            return None
        zero = int(number)
    maker = editor.made_by(value, "aten::round")
    scale = None if maker is None else _quotient(editor, maker.arguments[0])
    if scale is None:
        return None
    x, number = scale
    return x, (number, zero, bounds["aten::maximum"], bounds["aten::minimum"]), dtype


def _becomes_numbers(editor: Editor, integers: Value) -> bool:
    """Whether bytes are taken as numbers again: else they may be the pixels of an image, say, which
    are what torch makes of them to the last one."""
    takers = editor.takers.get(integers, [])
    return any(_cast_to(taker) == torch.float32 for taker in takers)


def _quotient(editor: Editor, value: Argument) -> tuple[Value, float] | None:
    """What is divided, and by which number."""
    maker = editor.made_by(value, "aten::div.Tensor", "aten::mul.Tensor")
    if maker is None:
        return None
    if maker.target == "aten::div.Tensor":
        x, number = maker.arguments[0], number_of(editor, maker.arguments[1])
    else:
        x, number = _and_number(editor, maker)
        number = None if not number else 1.0 / number
    is_usable = isinstance(x, Value) and number is not None and number > 0
    return (x, float(number)) if is_usable and number is not None else None


def scaled_by_formula(editor: Editor, step: Step) -> _Scaled | None:
    """Bytes that a step makes numbers of; their scale, zero point, axis and the result's dtype.

    Without axis scale and zero point are numbers; else tensors, the zero point None if there is
    none. None for other steps.
    """
    result = step.results[0] if step.results else None
    if step.target != "aten::mul.Tensor" or result is None or result.meta is None:
        return None
    for value, scale in (step.arguments, step.arguments[::-1]):
        found = _differences(editor, value)
        if found is None or not isinstance(scale, Value):
            continue
        integers, zero = found
        axis = _axis(scale, integers)
        numbers = number_of(editor, scale), 0 if zero is None else number_of(editor, zero)
        is_cast = result.meta.dtype == torch.float32
        if not is_cast or result.meta.shape != integers.meta.shape:  # type: ignore[union-attr]
            continue
        if numbers[0] is not None and numbers[1] is not None and int(numbers[1]) == numbers[1]:
            return integers, float(numbers[0]), int(numbers[1]), None, result.meta.dtype
        is_alike = zero is None or numbers[1] is not None or _axis(zero, integers) == axis
        if axis is not None and is_alike:
            return integers, scale, zero, axis, result.meta.dtype
    return None


def _differences(editor: Editor, value: Argument) -> tuple[Value, Value | None] | None:
    """Bytes from which a zero point is subtracted, and this; None where there is none."""
    zero = None
    maker = editor.made_by(value, "add")
    if maker is not None and maker.arguments[2] == "-1.0":
        value, zero = maker.arguments[:2]
    cast = editor.made_by(value, _COPY)
    if cast is None or _cast_to(cast) != torch.float32:
        return None
    integers = cast.arguments[0]
    is_bytes = integers.meta is not None and integers.meta.dtype in _BYTES
    return (integers, zero) if is_bytes else None


def _axis(channels: Value, x: Value) -> str | None:
    """The dimension along which a tensor has numbers of another one's channels."""
    if channels.meta is None or x.meta is None or channels.meta.dim() > x.meta.dim():
        return None
    shape = [1] * (x.meta.dim() - channels.meta.dim()) + [*channels.meta.shape]
    wide = [place for place, size in enumerate(shape) if size != 1]
    is_right = len(wide) == 1 and shape[wide[0]] == x.meta.shape[wide[0]]
    return str(wide[0]) if is_right else None


def _cast_to(step: Step) -> torch.dtype | None:
    """The dtype that a step gives a tensor, and nothing else."""
    if step.target != _COPY or any(word != "none" for word in step.arguments[2:5]):
        return None
    word = step.arguments[1]
    return getattr(torch, word.item.strip("=")) if isinstance(word, Some) else None


def _and_number(editor: Editor, step: Step) -> tuple[Any, int | float | None]:
    """The two that a step takes, with the number last."""
    first, second = step.arguments[:2]
    number = number_of(editor, second)
    if number is not None:
        return first, number
    return second, number_of(editor, first)
