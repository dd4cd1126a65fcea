"""Passes over convolutions: folded normalization, packed weights, and what follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...ops.linear import supports
from ..program import Argument, Some, Step, Value
from .convolution_times import (
    CONVOLUTION,
    LAST,
    PACK,
    PACK_TRANSPOSED,
    PACKED,
    PACKED_TRANSPOSED,
    convolution_of,
    size_of,
    winners,
)
from .editor import VIEWS, Editor, known, takes_any_order
from .linear import NO_VECTOR, fuse_after, is_vector
from .post_ops import is_activation, other_of_sum, words

NORM = "aten::_native_batch_norm_legit_no_training"
UNSQUEEZE, SQUEEZE = "aten::unsqueeze", "aten::squeeze.dim"
_ONE = "2"
"""The dimension of size 1 that a convolution of one dimension gets: oneDNN's have two or three."""
_FOLDED = (torch.float32, torch.bfloat16, torch.float16)


def fold_pads(editor: Editor) -> None:
    """Have convolutions add the zeros that a step before them adds on both sides alike."""
    for step in editor.steps.steps:
        if step.target != CONVOLUTION or step.arguments[6] != "false":
            continue
        found = zeros_before(editor, step)
        if found is None or any(before != after for before, after in found[1]):
            continue
        x, pairs = found
        padding = [str(int(own) + n) for own, (n, _) in zip(step.arguments[4], pairs, strict=True)]
        arguments = [x, *step.arguments[1:4], padding, *step.arguments[5:]]
        editor.replace(step, step.with_arguments(arguments))
    editor.apply()


def zeros_before(editor: Editor, step: Step) -> tuple[Value, list[tuple[int, int]]] | None:
    """What a step before a convolution adds zeros to, and how many before and after each spatial
    dimension; None where there is no such step."""
    before = editor.made_by(step.arguments[0], "aten::pad", "aten::constant_pad_nd")
    if before is None:
        return None
    pairs = zeros_of(before)
    if pairs is None:
        return None
    dims = len(step.arguments[4])
    others, last = pairs[:-dims], pairs[-dims:]
    if any(pair != (0, 0) for pair in others) or any(min(pair) < 0 for pair in last):
        return None
    return before.arguments[0], [(0, 0)] * (dims - len(last)) + last


def zeros_of(step: Step) -> list[tuple[int, int]] | None:
    """How many zeros a step of `pad` adds before and after each of the last dimensions; None where
    that is not known, or where they are no zeros."""
    _, sizes, *rest = step.arguments
    are_zeros = rest == ["0.0"] or rest == ["0"] or rest == ['"constant"', Some("0.0")]
    if not are_zeros or not all(isinstance(size, str) for size in sizes):
        return None
    return [(int(a), int(b)) for a, b in zip(sizes[::2], sizes[1::2], strict=True)][::-1]


def padded_input(editor: Editor, step: Step) -> tuple[Value, list[str]]:
    """What a convolution takes, and the zeros that are added before and after each spatial
    dimension, those of a step before it among them."""
    x, pairs = step.arguments[0], [(int(size), int(size)) for size in step.arguments[4]]
    zeros = zeros_before(editor, step)
    if zeros is not None:
        x = zeros[0]
        pairs = [(a + c, b + d) for (a, b), (c, d) in zip(pairs, zeros[1], strict=True)]
    return x, [str(size) for pair in pairs for size in pair]


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
        lasting = [
            before.arguments[1],
            mean,
            variance,
            *given_of(before.arguments[2], weight, bias),
        ]
        if not all(value in editor.lasting for value in lasting):
            editor.leave(step, "the weight of the convolution changes")
            continue
        if any(value.meta is None or value.meta.dtype not in _FOLDED for value in lasting):
            continue
        folded, shift, makes = _folded(editor, before, step.arguments)
        arguments = [before.arguments[0], folded, Some(shift), *before.arguments[3:]]
        editor.replace(step, *makes, Step(CONVOLUTION, arguments, step.results[:1]))
    editor.apply()


def given_of(*optional: Argument) -> list[Value]:
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
    editor.steps.constants[small] = torch.tensor(float(eps), device="cpu")
    scale = make("aten::rsqrt", make("add", wide(variance), small, "1.0"))
    for each in given_of(weight):
        scale = make("aten::mul.Tensor", scale, wide(each))
    folded = _scaled(make, convolution, wide(own), scale)
    shift = make("aten::neg", wide(mean))
    for each in given_of(convolution.arguments[2]):
        shift = make("add", shift, wide(each), "1.0")
    shift = make("aten::mul.Tensor", shift, scale)
    for each in given_of(bias):
        shift = make("add", shift, wide(each), "1.0")
    folded, shift = cast(folded, own.meta.dtype), cast(shift, own.meta.dtype)
    folded.meta, shift.meta = own.meta, norm[3].meta.to(own.meta.dtype)
    return folded, shift, steps


def _scaled(make: Callable[..., Value], convolution: Step, weight: Value, scale: Value) -> Value:
    """A weight with a factor for each channel of the result."""
    shape = [*map(str, convolution.arguments[1].meta.shape)]
    ones = ["1"] * (len(shape) - 2)
    if convolution.arguments[6] == "false":
        return make("aten::mul.Tensor", weight, make("aten::reshape", scale, ["-1", "1", *ones]))
    inputs, outputs = shape[:2]  # of all groups, of one
    groups = convolution.arguments[8]
    parts = make("aten::reshape", weight, [groups, str(int(inputs) // int(groups)), *shape[1:]])
    scale = make("aten::reshape", scale, [groups, "1", outputs, *ones])
    return make("aten::reshape", make("aten::mul.Tensor", parts, scale), shape)


def pack(editor: Editor) -> None:
    """Have convolutions of known sizes take packed weights, where that is faster."""
    found = False
    steps = changeable(editor, lambda step: why_plain(editor, step))
    wins = winners(editor, steps)
    for step in steps:
        if step not in wins:
            editor.leave(step, "a packed weight was timed and is not faster")
            continue
        editor.replace(step, *_packed(step))
        found = True
    editor.apply()
    if found:
        _past_squeezes(editor)
        follow_order(editor)


def changeable(editor: Editor, why_not: Callable[[Step], str]) -> list[Step]:
    """The convolutions that may return another order; of others it is said why not."""
    bases = {_base(editor, value) for value in editor.steps.outputs}
    are_restored = all(map(_can_be_restored, bases))
    steps = []
    for step in editor.steps.steps:
        if step.target != CONVOLUTION:
            continue
        why = why_not(step)
        if not why and not are_restored:
            why = "an output of the program lies in an order that a program cannot make"
        if why:
            editor.leave(step, why)
        else:
            steps.append(step)
    return steps


def _packed(step: Step) -> list[Step]:
    """The steps of a convolution with a packed weight."""
    x, weight, bias, *_ = step.arguments
    result: Any = step.results[0]
    steps: list[Step] = []
    geometry = [[*map(str, each)] for each in convolution_of(step).geometry[:-1]]
    words_ = [*geometry, step.arguments[8]]
    own = result
    if x.meta.dim() == 3:
        x, weight = (_unsqueezed(each, steps) for each in (x, weight))
        own = Value(meta=result.meta.unsqueeze(2))
    is_transposed = step.arguments[6] != "false"
    make, run = (PACK_TRANSPOSED, PACKED_TRANSPOSED) if is_transposed else (PACK, PACKED)
    packed = Value()
    size = [str(each) for each in size_of(x.meta)]
    steps.append(Step(make, [weight, *words_, Some(size)], [packed]))
    steps.append(Step(run, [x, packed, bias, *words_, *words("none", "")], [own]))
    if own is not result:
        steps.append(Step(SQUEEZE, [own, _ONE], [result], is_view=True))
    return steps


def _unsqueezed(value: Value, steps: list[Step]) -> Value:
    assert value.meta is not None
    own = Value(meta=value.meta.unsqueeze(2))
    steps.append(Step(UNSQUEEZE, [value, _ONE], [own], is_view=True))
    return own


def why_plain(editor: Editor, step: Step, any_size: bool = False, own: bool = False) -> str:
    """Why a convolution cannot take a packed weight; empty if it can.

    any_size: whether the size of its input may be unknown.
    own: whether the operator is ours.
    """
    x, weight, bias, *_ = step.arguments
    metas = [value.meta for value in (x, weight, *given_of(bias))]
    if weight not in editor.lasting:
        return "its weight is computed at each call"
    if any(meta is None or meta.dtype != metas[0].dtype for meta in metas):
        return "input, weight and bias differ in dtype"
    if not metas[0].dim() == metas[1].dim() in (3, 4, 5):
        return "it is of a single image without a batch"
    if known(metas[1].shape) is None:
        return "the size of its weight is not known"
    if not any_size and known(metas[0].shape[1:]) is None:
        return "the size of its input is not known"
    if (own or not any_size) and 0 in size_of(metas[0]):
        return "its input is empty, or of a size that values decide"
    if not own and not all(map(is_vector, metas[2:])):
        return NO_VECTOR
    return "" if own else supports(metas[0].dtype) or ""


def _past_squeezes(editor: Editor) -> None:
    """Have what is computed of each element of a convolution's result computed before its extra
    dimension is taken away, so that the convolution can compute it in its sweep."""
    moved = True
    while moved:
        moved = False
        for step in editor.steps.steps:
            moved |= _past_squeeze(editor, step)
        editor.apply()
    for step in editor.steps.steps:
        before = editor.made_by(step.arguments[0], SQUEEZE) if step.target == UNSQUEEZE else None
        if before is not None and _takes_one_away(before) and step.arguments[1] == _ONE:
            assert step.results[0] is not None
            editor.redirect(step.results[0], before.arguments[0])
    editor.apply()


def _takes_one_away(step: Step) -> bool:
    """Whether a step ends the extra dimension of a convolution of one dimension."""
    values = step.arguments[0], step.results[0]
    dims = [v.meta.dim() for v in values if v is not None and v.meta is not None]
    return step.arguments[1] == _ONE and dims == [4, 3]


def _past_squeeze(editor: Editor, step: Step) -> bool:
    """Exchange the end of the extra dimension and what follows it; whether that was done."""
    (result,) = step.results[:1]
    if step.target != SQUEEZE or result is None or editor.is_changed(step):
        return False
    source, taker = step.arguments[0], editor.only_taker(result)
    if taker is None or editor.is_changed(taker) or not _takes_one_away(step):
        return False
    if editor.only_taker(source) is not step or len(taker.results) != 1:
        return False
    other, steps, made = other_of_sum(taker, result), list[Step](), taker.results[0]
    if made is None or made.meta is None or made.meta.dtype != source.meta.dtype:
        return False
    arguments: list[Argument] = [source, *taker.arguments[1:]]
    if other is not None:
        arguments = [source, _unsqueezed(other, steps), taker.arguments[2]]
    elif not is_activation(taker):
        return False
    own = Value(meta=made.meta.unsqueeze(2))
    steps.append(Step(taker.target, arguments, [own]))
    steps.append(Step(SQUEEZE, [own, _ONE], [made], is_view=True))
    editor.replace(step)
    editor.replace(taker, *steps)
    return True


def channels_last(editor: Editor) -> None:
    """Have convolutions take their weights, and with them their inputs, in channels-last order:
    in torch's order oneDNN reorders what each takes and returns."""
    found = False
    for step in changeable(editor, lambda step: why_plain(editor, step, any_size=True)):
        x, weight, *rest = step.arguments
        if weight.meta.dim() not in LAST or step.arguments[6] != "false":
            editor.leave(step, "it is transposed, or of one dimension")
            continue
        order = LAST[weight.meta.dim()]
        own = Value(meta=weight.meta.to(memory_format=order))
        word = Some(f"={order}".replace("torch.", ""))
        make = Step("aten::clone", [weight, word], [own])
        editor.replace(step, make, step.with_arguments([x, own, *rest]))
        found = True
    editor.apply()
    if found:
        follow_order(editor)


def follow_order(editor: Editor) -> None:
    """Take care of what expects tensors in torch's order: packed convolutions return them in
    channels-last order, which is not what the graph was captured with."""
    for step in editor.steps.steps:
        if step.target in VIEWS[:2]:
            editor.replace(step, replace(step, target=VIEWS[2]))
    editor.apply()
    _before_group_norms(editor)
    for base in dict.fromkeys(_base(editor, value) for value in editor.steps.outputs):
        maker, order = editor.maker.get(base), _order(base)
        if maker is None or order is None:
            continue
        raw = Value(meta=base.meta)
        results = [raw if value is base else value for value in maker.results]
        own = Step("aten::contiguous", [raw, order], [base], is_view=True)
        editor.replace(maker, replace(maker, results=results), own)
        editor.apply()


def _before_group_norms(editor: Editor) -> None:
    """Torch's operator wants what a convolution returns, or a tensor in torch's order: neither a
    part of that nor one with a dimension less."""
    for step in editor.steps.steps:
        if step.target != "aten::native_group_norm":
            continue
        x, *rest = step.arguments
        maker = editor.maker.get(x)
        if x.meta is None or x.meta.dim() == 3 or (maker is not None and maker.is_view):
            own = Value(meta=x.meta)
            copy = Step("aten::contiguous", [x, "=contiguous_format"], [own], is_view=True)
            editor.replace(step, copy, step.with_arguments([own, *rest]))
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
    last = LAST.get(meta.dim())
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
    fuse_after(editor, PACKED_TRANSPOSED, 8, lambda *_: None, lambda _: True)


def _with_other(step: Step, other: Value, result: Value | None) -> Step | None:
    x, packed, bias, *geometry = step.arguments[:7]
    arguments = [x, other, packed, bias, *geometry, '"add"', "none", "none", [], "none"]
    return Step(f"{PACKED}.binary", arguments, [result])
