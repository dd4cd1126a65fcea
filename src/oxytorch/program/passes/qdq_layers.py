"""Layers of programs that were quantized elsewhere (QDQ), whose inputs and weights were integers.

A layer stands between steps that make numbers of integers, and one that rounds what it gives. It
multiplies these very integers, with their scales and zero points; what it gives is rounded as the
next step says, in the layer's sweep.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..program import Argument, Some, Step, Value
from .convolution import can_follow_order, changeable, follow_order, padded_input
from .convolution_times import CONVOLUTION
from .editor import Editor, is_contiguous
from .linear import LINEAR
from .moves import MOVES, of_bytes
from .qdq import SCALE_CHANNELS
from .qdq_formulas import known_tensor
from .quantized import (
    DEQUANTIZE,
    QUANTIZE,
    convolution_of_bytes,
    join,
    linear_of_bytes,
    why_not,
)
from .quantized_layers import Numbers
from .quantized_weights import Making, Rounded

_TURNS = ("aten::t", "aten::transpose.int", "aten::permute")
_MAX = ("aten::max_pool1d", "aten::max_pool2d", "aten::max_pool3d")
_MIDDLE = {torch.int8: 0, torch.uint8: 128}
"""The zero point of a weight whose integers, without it, are signed bytes."""


@dataclass(frozen=True)
class _Found:
    """The integers of a layer. make: steps that come before it."""

    x: Value
    numbers: Numbers
    pads: list[str]
    stored: Rounded
    make: Making


class _UnfitError(Exception):
    """Why a layer is left."""


def layers(editor: Editor) -> None:
    """Have linear layers and convolutions between integers multiply these."""
    _layers(editor, (LINEAR, CONVOLUTION) if can_follow_order(editor) else (LINEAR,))


def linear_layers(editor: Editor) -> None:
    """The same where convolutions may not be given another order in memory."""
    _layers(editor, (LINEAR,))


def _layers(editor: Editor, targets: tuple[str, ...]) -> None:
    if not any(step.target in (DEQUANTIZE, SCALE_CHANNELS) for step in editor.steps.steps):
        return
    _as_linear(editor)
    _with_bias(editor)
    _pool_once(editor)
    found: dict[Step, _Found] = {}
    reasons: dict[Step, str] = {}
    for step in editor.steps.steps:
        if step.target in (LINEAR, CONVOLUTION) and _is_near(editor, step):
            try:
                if step.target not in targets:
                    raise _UnfitError("another step depends on how its input lies in memory")
                found[step] = _look(editor, step)
            except _UnfitError as error:
                reasons[step] = str(error)
                editor.leave(step, str(error))
    has_convolutions = any(step.target == CONVOLUTION for step in found)
    if has_convolutions:
        fit = {*changeable(editor, lambda step: "" if step in found else reasons.get(step, _PLAIN))}
        found = {s: own for s, own in found.items() if s.target == LINEAR or s in fit}
    for step, own in found.items():
        if step.target == LINEAR:
            made = linear_of_bytes(step, own.x, own.numbers, own.make, own.stored)
        else:
            made = convolution_of_bytes(step, own.x, own.pads, own.numbers, own.make, own.stored)
        editor.replace(step, *own.make.steps, made)
    editor.apply()
    if has_convolutions:
        follow_order(editor)
    join(editor, {})


_PLAIN = "neither its input nor its weight were integers"


def _is_near(editor: Editor, step: Step) -> bool:
    """Whether integers stand before a layer."""
    if editor.lasts(step):
        return False
    weight, _ = _turned(editor, step.arguments[1])
    is_stored = editor.made_by(weight, SCALE_CHANNELS, DEQUANTIZE) is not None
    return is_stored or editor.made_by(step.arguments[0], DEQUANTIZE) is not None


def _look(editor: Editor, step: Step) -> _Found:
    why = why_not(editor, step)
    if why:
        raise _UnfitError(why)
    make = Making(editor.steps.constants)
    x, pads = (step.arguments[0], []) if step.target == LINEAR else padded_input(editor, step)
    bytes_, numbers = _input(editor, make, x)
    return _Found(bytes_, numbers, pads, _weight(editor, make, step.arguments[1]), make)


def _input(editor: Editor, make: Making, x: Value) -> tuple[Value, Numbers]:
    """The bytes that a layer takes."""
    maker = editor.made_by(x, DEQUANTIZE, *MOVES)
    if maker is None:
        raise _UnfitError("its input is not rounded to 8 bits with one scale that is known")
    source = maker.arguments[0]
    if maker.target == DEQUANTIZE:
        scale, zero_point = maker.arguments[1:3]
        dtype = str(source.meta.dtype).removeprefix("torch.")
        return source, Numbers(float(scale), int(zero_point), dtype)
    if any(maker.results[1:]):
        raise _UnfitError(f"{maker.target} stands between its input and the integers")
    bytes_, numbers = _input(editor, make, source)
    result = of_bytes(x, numbers.torch_dtype)
    arguments = [bytes_, *maker.arguments[1:]]
    make.steps.append(replace(maker, arguments=arguments, results=[result]))
    return result, numbers


def _turned(editor: Editor, weight: Argument) -> tuple[Argument, bool]:
    """The matrix that a weight is the transpose of, and whether it is one."""
    is_turned = False
    maker = editor.made_by(weight, *_TURNS)
    while maker is not None and maker.arguments[0].meta.dim() == 2:
        words = [int(word) % 2 for word in _words(maker.arguments[1:])]
        is_turned ^= words in ([], [0, 1], [1, 0]) and not _is_identity(maker)
        weight = maker.arguments[0]
        maker = editor.made_by(weight, *_TURNS)
    return weight, is_turned


def _words(arguments: Any) -> list[str]:
    return [*arguments[0]] if arguments and isinstance(arguments[0], list) else [*arguments]


def _is_identity(step: Step) -> bool:
    words = [int(word) % 2 for word in _words(step.arguments[1:])]
    return step.target == "aten::permute" and words == [0, 1]


def _weight(editor: Editor, make: Making, weight: Value) -> Rounded:
    """The integers of a weight with their scales, one for each output."""
    stored, is_turned = _turned(editor, weight)
    maker = editor.made_by(stored, DEQUANTIZE, SCALE_CHANNELS)
    if maker is None:
        raise _UnfitError("its weight is not rounded to integers")
    integers = maker.arguments[0]
    dtype = integers.meta.dtype
    if integers not in editor.lasting or dtype not in _MIDDLE:
        raise _UnfitError("its weight is no constant of 8 bits")
    assert weight.meta is not None
    outputs = weight.meta.shape[0]
    if maker.target == DEQUANTIZE:
        zeros = {int(maker.arguments[2])}
        scales = Value(meta=torch.empty(outputs, device="meta"))
        make.constants[scales] = torch.full((outputs,), float(maker.arguments[1]), device="cpu")
    else:
        _, scales, zero, axis = maker.arguments[:4]
        if int(axis) % integers.meta.dim() != int(is_turned):
            raise _UnfitError("the scales of its weight are not those of its outputs")
        tensor = (
            known_tensor(editor, zero.item)
            if isinstance(zero, Some)
            else torch.zeros(1, device="cpu")
        )
        if tensor is None:
            raise _UnfitError("the zero points of its weight are not known")
        zeros = {*map(int, tensor.flatten().tolist())}
        # A view of a buffer, which others may be, would be made at each call.
        scales = make("aten::clone", make.to(scales, torch.float32), "none")
    if zeros != {_MIDDLE[dtype]}:
        raise _UnfitError(
            f"its weight has zero points other than {_MIDDLE[dtype]}, by which it is no signed byte"
        )
    if dtype == torch.uint8:
        turning = Value()
        make.constants[turning] = torch.tensor(128, dtype=torch.uint8, device="cpu")
        integers = make("aten::bitwise_xor.Tensor", integers, turning)
        integers = make("aten::view.dtype", integers, "=int8")
    if is_turned:
        integers = make("aten::t", integers)
    return integers, scales


def _as_linear(editor: Editor) -> None:
    """Write a product with a matrix of integers as a linear layer."""
    for step in editor.steps.steps:
        if step.target not in ("aten::matmul", "aten::mm") or editor.lasts(step):
            continue
        x, second = step.arguments
        matrix, _ = _turned(editor, second)
        is_stored = editor.made_by(matrix, DEQUANTIZE, SCALE_CHANNELS) is not None
        metas = [each.meta for each in (x, second)]
        if not is_stored or any(meta is None for meta in metas) or second not in editor.lasting:
            continue
        if metas[0].dim() < 2 or metas[1].dim() != 2 or not is_contiguous(step.results[0]):
            continue
        turned = Value(meta=metas[1].t())
        editor.replace(
            step,
            Step("aten::t", [second], [turned], is_view=True),
            Step(LINEAR, [x, turned, "none"], step.results),
        )
    editor.apply()


def _with_bias(editor: Editor) -> None:
    """Have linear layers add a row that a step behind them adds."""
    for step in editor.steps.steps:
        (result,) = step.results[:1] or [None]
        if step.target != LINEAR or step.arguments[2] != "none" or result is None:
            continue
        taker = editor.only_taker(result)
        if taker is None or taker.target != "add" or taker.arguments[2] != "1.0":
            continue
        first, second, _ = taker.arguments
        row = second if first is result else first
        metas = [None if value is None else value.meta for value in (row, result)]
        if row not in editor.lasting or metas[0] is None or metas[1] is None:
            continue
        if [*metas[0].shape] == [metas[1].shape[-1]] and metas[0].dtype == metas[1].dtype:
            editor.replace(step)
            arguments = [*step.arguments[:2], Some(row)]
            editor.replace(taker, Step(LINEAR, arguments, taker.results))
    editor.apply()


def _pool_once(editor: Editor) -> None:
    """Round what is pooled behind the largest of windows alone, where it is rounded before too:
    the largest of rounded numbers is the largest one rounded."""
    for step in editor.steps.steps:
        numbers = editor.made_by(step.arguments[0], DEQUANTIZE) if step.target in _MAX else None
        rounding = None if numbers is None else editor.made_by(numbers.arguments[0], QUANTIZE)
        result = step.results[0] if step.results else None
        if numbers is None or rounding is None or result is None or result in editor.outputs:
            continue
        words = rounding.arguments[1:]
        takers = editor.takers.get(result, [])
        is_again = all(t.target == QUANTIZE and t.arguments[1:] == words for t in takers)
        if is_again and numbers.arguments[1:3] == words[:2] and numbers.arguments[3] == _WIDE:
            arguments = [rounding.arguments[0], *step.arguments[1:]]
            editor.replace(step, step.with_arguments(arguments))
    editor.apply()


_WIDE = '"float32"'
