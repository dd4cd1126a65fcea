"""Passes over convolutions: folded normalization, packed weights, and what follows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...ops.linear import supports
from ...rewriting.measure import about, first_win, numbers
from ..program import Argument, Some, Step, Value
from .editor import VIEWS, Editor, known, takes_any_order
from .linear import fuse_after
from .post_ops import words

CONVOLUTION, NORM = "aten::convolution", "aten::_native_batch_norm_legit_no_training"
PACK = "mkldnn::_reorder_convolution_weight"
PACKED = "mkldnn::_convolution_pointwise"
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The orders with channels last, by numbers of dimensions."""
_FOLDED = (torch.float32, torch.bfloat16, torch.float16)


def fold_pads(editor: Editor) -> None:
    """Have convolutions add the zeros that a step before them adds on both sides alike."""
    for step in editor.steps.steps:
        if step.target != CONVOLUTION:
            continue
        before = editor.made_by(step.arguments[0], "aten::pad")
        if before is None:
            continue
        x, sizes, mode, value = before.arguments
        padding, is_transposed = step.arguments[4], step.arguments[6] != "false"
        own = _on_both_sides(sizes, len(padding))
        if own is None or mode != '"constant"' or value != Some("0.0") or is_transposed:
            continue
        total = [str(int(a) + b) for a, b in zip(padding, own, strict=True)]
        arguments = [x, *step.arguments[1:4], total, *step.arguments[5:]]
        editor.replace(step, step.with_arguments(arguments))
    editor.apply()


def _on_both_sides(sizes: list[Any], dims: int) -> list[int] | None:
    """The zeros on each side of each of the last dimensions, None where the sides differ."""
    if not all(isinstance(size, str) for size in sizes):
        return None
    pairs = [(int(a), int(b)) for a, b in zip(sizes[::2], sizes[1::2], strict=True)][::-1]
    others, last = pairs[:-dims], pairs[-dims:]
    if any(pair != (0, 0) for pair in others) or any(a != b or a < 0 for a, b in last):
        return None
    return [0] * (dims - len(last)) + [a for a, _ in last]


def fold_norms(editor: Editor) -> None:
    """Fold batch normalization into the weights of the convolution before it.

    With s = weight / sqrt(variance + eps) of the normalization, the convolution's weight becomes
    s w and its bias s (b - mean) + bias.
    """
    for step in editor.steps.steps:
        if step.target != NORM or any(step.results[1:]):
            continue
        x, weight, bias, mean, variance, *_ = step.arguments
        before = editor.made_by(x, CONVOLUTION)
        if before is None or editor.only_taker(x) is not step:
            editor.leave(step, "no convolution before it, or others take what that makes")
            continue
        lasting = [before.arguments[1], mean, variance, *_given(before.arguments[2], weight, bias)]
        is_transposed = before.arguments[6] != "false"
        if is_transposed or not all(value in editor.lasting for value in lasting):
            editor.leave(step, "the convolution is transposed, or its weight changes")
            continue
        if any(value.meta is None or value.meta.dtype not in _FOLDED for value in lasting):
            continue
        folded, shift, makes = _folded(editor, before, step.arguments)
        arguments = [before.arguments[0], folded, Some(shift), *before.arguments[3:]]
        editor.replace(step, *makes, Step(CONVOLUTION, arguments, step.results[:1]))
    editor.apply()


def _given(*optional: Argument) -> list[Value]:
    return [each.item for each in optional if isinstance(each, Some)]


def _folded(editor: Editor, convolution: Step, norm: Any) -> tuple[Value, Value, list[Step]]:
    """The weight and bias of a convolution with a normalization folded in, and what makes them."""
    _, weight, bias, mean, variance, _, eps = norm
    own: Any = convolution.arguments[1]
    steps: list[Step] = []

    def make(target: str, *arguments: Argument) -> Value:
        result = Value()
        steps.append(Step(target, [*arguments], [result]))
        return result

    def cast(value: Value, dtype: torch.dtype) -> Value:
        if value.meta is not None and value.meta.dtype == dtype:
            return value
        name = f"={dtype}".replace("torch.", "")
        return make("aten::_to_copy", value, Some(name), *["none"] * 3, "false", "none")

    def wide(value: Value) -> Value:
        return cast(value, torch.float32)

    small = Value()
    editor.steps.constants[small] = torch.tensor(float(eps))
    scale = make("aten::rsqrt", make("add", wide(variance), small, "1.0"))
    for each in _given(weight):
        scale = make("aten::mul.Tensor", scale, wide(each))
    sizes = ["-1", *["1"] * (own.meta.dim() - 1)]
    folded = make("aten::mul.Tensor", wide(own), make("aten::reshape", scale, sizes))
    shift = make("aten::neg", wide(mean))
    for each in _given(convolution.arguments[2]):
        shift = make("add", shift, wide(each), "1.0")
    shift = make("aten::mul.Tensor", shift, scale)
    for each in _given(bias):
        shift = make("add", shift, wide(each), "1.0")
    folded, shift = cast(folded, own.meta.dtype), cast(shift, own.meta.dtype)
    folded.meta, shift.meta = own.meta, own.meta.new_empty(own.meta.shape[:1])
    return folded, shift, steps


def pack(editor: Editor) -> None:
    """Have convolutions of known sizes take packed weights, where that is faster."""
    found = False
    steps = []
    are_restored = all(
        map(_can_be_restored, {_base(editor, value) for value in editor.steps.outputs})
    )
    for step in editor.steps.steps:
        if step.target != CONVOLUTION:
            continue
        why = _why_plain(editor, step)
        if not why and not are_restored:
            why = "an output of the program lies in an order that a program cannot make"
        if why:
            editor.leave(step, why)
        else:
            steps.append(step)
    for step in steps:
        x, weight, bias, stride, padding, dilation, _, _, groups = step.arguments
        if not _pays(x.meta, weight.meta, [stride, padding, dilation, groups], len(steps) == 1):
            editor.leave(step, "a packed weight was timed and is not faster")
            continue
        packed, geometry = Value(), [padding, stride, dilation, groups]
        size = [str(each) for each in x.meta.shape]
        make = Step(PACK, [weight, *geometry, Some(size)], [packed])
        call = Step(PACKED, [x, packed, bias, *geometry, *words("none", "")], step.results)
        editor.replace(step, make, call)
        found = True
    editor.apply()
    if found:
        _follow_order(editor)


def _why_plain(editor: Editor, step: Step, any_size: bool = False) -> str:
    """Why a convolution cannot take a packed weight; empty if it can."""
    x, weight, bias, *_, transposed, _, _ = step.arguments
    metas = [value.meta for value in (x, weight, *_given(bias))]
    if weight not in editor.lasting:
        return "its weight is computed at each call"
    if any(meta is None or meta.dtype != metas[0].dtype for meta in metas):
        return "input, weight and bias differ in dtype"
    if transposed != "false" or not metas[0].dim() == metas[1].dim() in (4, 5):
        return "it is transposed, or of one dimension, or of a single image without a batch"
    if known(metas[1].shape) is None:
        return "the size of its weight is not known"
    if not any_size and (known(metas[0].shape) is None or 0 in metas[0].shape):
        return "the size of its input is not known, or it is empty"
    return supports(metas[0].dtype) or ""


def _pays(x: Any, weight: Any, words_: list[Any], is_alone: bool) -> bool:
    """Whether the packed convolution is faster than torch's own on such an input.

    is_alone: whether it is the only one, so that what it takes and returns has torch's order.
    """
    stride, padding, dilation = ([int(each) for each in word] for word in words_[:3])
    groups = int(words_[3])
    size, channels = tuple(x.shape), tuple(map(about, weight.shape[:2]))
    geometry = (*map(tuple, (stride, padding, dilation)), groups)
    key = ("program", is_alone, channels, tuple(weight.shape[2:]), weight.dtype, geometry, size)
    order = _LAST[x.dim()]
    pack_, run = (getattr(torch.ops.mkldnn, word.split("::")[1]) for word in (PACK, PACKED))
    geometry_ = padding, stride, dilation, groups
    none = [0] * len(stride)

    @cache  # made where times are not known yet
    def made() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        given = numbers(*size).to(x.dtype)
        values = numbers(*weight.shape).to(x.dtype)
        packed = pack_.default(values, *geometry_, size)
        return given, given.contiguous(memory_format=order), values, packed

    def plain() -> Tensor:
        given, _, values, _ = made()
        return torch.convolution(
            given, values, None, stride, padding, dilation, False, none, groups
        )

    def ours() -> Tensor:
        given, last, _, packed = made()
        x = given if is_alone else last
        found: Tensor = run.default(x, packed, None, *geometry_, "none", [], "")
        return found.contiguous() if is_alone else found

    return first_win(key, [(plain, ours)]) is not None


def channels_last(editor: Editor) -> None:
    """Have convolutions take their weights, and with them their inputs, in channels-last order:
    in torch's order oneDNN orders what each takes and returns anew."""
    if not all(map(_can_be_restored, {_base(editor, value) for value in editor.steps.outputs})):
        return
    found = False
    for step in editor.steps.steps:
        if step.target != CONVOLUTION or _why_plain(editor, step, any_size=True):
            continue
        x, weight, *rest = step.arguments
        order = _LAST[weight.meta.dim()]
        own = Value(meta=weight.meta.to(memory_format=order))
        word = Some(f"={order}".replace("torch.", ""))
        make = Step("aten::clone", [weight, word], [own])
        editor.replace(step, make, step.with_arguments([x, own, *rest]))
        found = True
    editor.apply()
    if found:
        _follow_order(editor)


def _follow_order(editor: Editor) -> None:
    """Take care of what expects tensors in torch's order: packed convolutions return them in
    channels-last order, which is not what the graph was captured with."""
    for step in editor.steps.steps:
        if step.target in VIEWS[:2]:
            editor.replace(step, replace(step, target=VIEWS[2]))
    editor.apply()
    for base in dict.fromkeys(_base(editor, value) for value in editor.steps.outputs):
        maker, order = editor.maker.get(base), _order(base)
        if maker is None or order is None:
            continue
        raw = Value(meta=base.meta)
        results = [raw if value is base else value for value in maker.results]
        own = Step("aten::contiguous", [raw, order], [base], is_view=True)
        editor.replace(maker, replace(maker, results=results), own)
        editor.apply()


def _base(editor: Editor, value: Value) -> Value:
    """The tensor that an output is a view of."""
    maker = editor.maker.get(value)
    while maker is not None and maker.is_view and isinstance(maker.arguments[0], Value):
        value = maker.arguments[0]
        maker = editor.maker.get(value)
    return value


def _can_be_restored(value: Value) -> bool:
    """Whether a program can give a tensor the order in which it lies with torch."""
    return value.is_size or value.meta is None or _order(value) is not None


def _order(value: Value) -> str | None:
    """The order in which a tensor lies, of those that a program knows."""
    meta = value.meta
    if meta is None:
        return None
    if meta.is_contiguous():
        return "=contiguous_format"
    last = _LAST.get(meta.dim())
    is_last = last is not None and meta.is_contiguous(memory_format=last)
    return f"={last}".replace("torch.", "") if is_last else None


def can_follow_order(editor: Editor) -> bool:
    """Whether no step depends on how its input lies in memory."""
    return all(map(takes_any_order, editor.steps.steps))


def leave_all(editor: Editor) -> None:
    """Say why no convolution is changed, where one is there and a step depends on the order."""
    editor.by = "convolution.pack"
    for step in editor.steps.steps:
        if step.target == CONVOLUTION:
            editor.leave(step, "another step depends on how its input lies in memory")


def fuse(editor: Editor) -> None:
    """Compute activations and sums in the sweep of the packed convolution before them."""
    fuse_after(editor, PACKED, 7, _with_other, lambda _: True)  # `pack` has seen to the order


def _with_other(step: Step, other: Value, result: Value | None) -> Step | None:
    x, packed, bias, *geometry = step.arguments[:7]
    arguments = [x, other, packed, bias, *geometry, '"add"', "none", "none", [], "none"]
    return Step(f"{PACKED}.binary", arguments, [result])
