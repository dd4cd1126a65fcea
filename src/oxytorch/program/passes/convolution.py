"""Passes over convolutions: folded normalization, packed weights, and what follows."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...ops.linear import supports
from ...rewriting.measure import CLEAR_GAIN, Calls, about, first_win, numbers
from ..program import Argument, Some, Step, Value
from .editor import VIEWS, Editor, known, takes_any_order
from .linear import fuse_after
from .post_ops import is_activation, other_of_sum, words

CONVOLUTION, NORM = "aten::convolution", "aten::_native_batch_norm_legit_no_training"
PACK = "mkldnn::_reorder_convolution_weight"
PACKED = "mkldnn::_convolution_pointwise"
PACK_TRANSPOSED = "mkldnn::_reorder_convolution_transpose_weight"
PACKED_TRANSPOSED = "mkldnn::_convolution_transpose_pointwise"
UNSQUEEZE, SQUEEZE = "aten::unsqueeze", "aten::squeeze.dim"
_ONE = "2"
"""The dimension of size 1 that a convolution of one dimension gets: oneDNN's have two or three."""
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
        if not all(value in editor.lasting for value in lasting):
            editor.leave(step, "the weight of the convolution changes")
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
    folded = _scaled(make, convolution, wide(own), scale)
    shift = make("aten::neg", wide(mean))
    for each in _given(convolution.arguments[2]):
        shift = make("add", shift, wide(each), "1.0")
    shift = make("aten::mul.Tensor", shift, scale)
    for each in _given(bias):
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
    wins = _winners(editor, steps)
    for step in steps:
        if step not in wins:
            editor.leave(step, "a packed weight was timed and is not faster")
            continue
        editor.replace(step, *_packed(step))
        found = True
    editor.apply()
    if found:
        _past_squeezes(editor)
        _follow_order(editor)


def _packed(step: Step) -> list[Step]:
    """The steps of a convolution with a packed weight."""
    x, weight, bias, *_ = step.arguments
    result: Any = step.results[0]
    steps: list[Step] = []
    geometry = [[*map(str, each)] for each in _geometry(step)[:-1]]
    words_ = [*geometry, step.arguments[8]]
    own = result
    if x.meta.dim() == 3:
        x, weight = (_unsqueezed(each, steps) for each in (x, weight))
        own = Value(meta=result.meta.unsqueeze(2))
    is_transposed = step.arguments[6] != "false"
    make, run = (PACK_TRANSPOSED, PACKED_TRANSPOSED) if is_transposed else (PACK, PACKED)
    packed = Value()
    size = [str(each) for each in x.meta.shape]
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


def _geometry(step: Step) -> list[Any]:
    """Padding, stride, dilation and groups as oneDNN's operators take them, for two dimensions
    where it has one; for a transposed convolution the padding of the result after the first."""
    stride, padding, dilation, transposed, more, groups = step.arguments[3:]
    pairs = [(padding, 0), (more, 0), (stride, 1), (dilation, 1)]
    if transposed == "false":
        del pairs[1]
    is_flat = len(stride) == 1
    return [
        *([neutral] * is_flat + [int(each) for each in word] for word, neutral in pairs),
        int(groups),
    ]


def _why_plain(editor: Editor, step: Step, any_size: bool = False) -> str:
    """Why a convolution cannot take a packed weight; empty if it can."""
    x, weight, bias, *_ = step.arguments
    metas = [value.meta for value in (x, weight, *_given(bias))]
    if weight not in editor.lasting:
        return "its weight is computed at each call"
    if any(meta is None or meta.dtype != metas[0].dtype for meta in metas):
        return "input, weight and bias differ in dtype"
    if not metas[0].dim() == metas[1].dim() in (3, 4, 5):
        return "it is of a single image without a batch"
    if known(metas[1].shape) is None:
        return "the size of its weight is not known"
    if not any_size and (known(metas[0].shape) is None or 0 in metas[0].shape):
        return "the size of its input is not known, or it is empty"
    return supports(metas[0].dtype) or ""


def _winners(editor: Editor, steps: list[Step]) -> set[Step]:
    """The convolutions that are faster with packed weights.

    Those of one dimension win or lose together, since they mostly exchange tensors, and have to be
    faster by more: other operators may be slower in their order.
    """
    timed = {step: _timed(step, *_torchs_order(editor, step, steps)) for step in steps}
    flat = [step for step in steps if step.arguments[0].meta.dim() == 3]
    wins = {step for step in steps if step not in flat and first_win(*timed[step]) is not None}
    if flat:
        keys = tuple(timed[step][0] for step in flat)
        pairs = [timed[step][1][0] for step in flat]

        def plain() -> Tensor:
            return [run() for run, _ in pairs][-1]

        def ours() -> Tensor:
            return [run() for _, run in pairs][-1]

        if first_win(keys, [(plain, ours)], CLEAR_GAIN) is not None:
            wins |= {*flat}
    return wins


def _torchs_order(editor: Editor, step: Step, steps: list[Step]) -> tuple[bool, bool]:
    """Whether what a convolution takes, and what it returns, is taken to have torch's order: where
    it is the only one; of one dimension also where no other one or transposition is next to it."""
    if len(steps) == 1:
        return True, True
    if step.arguments[0].meta.dim() != 3:
        return False, False
    before = editor.maker.get(step.arguments[0])
    while before is not None and is_activation(before):
        before = editor.maker.get(before.arguments[0])
    taken = before is None or before.target not in _NEXT
    todo, returned = [*editor.takers.get(step.results[0], [])], False  # type: ignore[arg-type]
    while todo:
        taker = todo.pop()
        if is_activation(taker) and taker.results[0] is not None:
            todo += editor.takers.get(taker.results[0], [])
        else:
            returned |= taker.target not in _NEXT
    return taken, returned


_NEXT = (CONVOLUTION, "aten::transpose.int", "aten::permute")


def _timed(step: Step, takes: bool, returns: bool) -> tuple[Hashable, list[Calls]]:
    """What the times of a convolution depend on; torch's own, and the packed one.

    takes, returns: whether what it takes, and returns, has torch's order.
    """
    x, weight = step.arguments[0].meta, step.arguments[1].meta
    geometry, is_transposed = _geometry(step), step.arguments[6] != "false"
    size, channels = tuple(x.shape), tuple(map(about, weight.shape[:2]))
    frozen = tuple(map(tuple, geometry[:-1])), geometry[-1], is_transposed
    key = ("program", takes, returns, channels, tuple(weight.shape[2:]), weight.dtype, frozen, size)
    targets = (PACK_TRANSPOSED, PACKED_TRANSPOSED) if is_transposed else (PACK, PACKED)
    pack_, run = (getattr(torch.ops.mkldnn, target.split("::")[1]) for target in targets)
    lists = [[int(each) for each in word] for word in (*step.arguments[3:6], step.arguments[7])]
    is_flat = x.dim() == 3

    @cache  # made where times are not known yet
    def made() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        given = numbers(*size).to(x.dtype)
        values = numbers(*weight.shape).to(x.dtype)
        wide, wide_values = (t.unsqueeze(2) if is_flat else t for t in (given, values))
        packed = pack_.default(wide_values, *geometry, [*wide.shape])
        return given, wide.contiguous(memory_format=_LAST[wide.dim()]), values, packed

    def plain() -> Tensor:
        given, _, values, _ = made()
        stride, padding, dilation, more = lists
        return torch.convolution(
            given, values, None, stride, padding, dilation, is_transposed, more, geometry[-1]
        )

    def ours() -> Tensor:
        given, last, _, packed = made()
        x = last if not takes else given.unsqueeze(2) if is_flat else given
        found: Tensor = run.default(x, packed, None, *geometry, "none", [], "")
        return found.contiguous() if returns else found

    return key, [(plain, ours)]


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
    in torch's order oneDNN orders what each takes and returns anew."""
    if not all(map(_can_be_restored, {_base(editor, value) for value in editor.steps.outputs})):
        return
    found = False
    for step in editor.steps.steps:
        if step.target != CONVOLUTION or _why_plain(editor, step, any_size=True):
            continue
        x, weight, *rest = step.arguments
        if weight.meta.dim() not in _LAST or step.arguments[6] != "false":
            editor.leave(step, "it is transposed, or of one dimension")
            continue
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
    fuse_after(editor, PACKED_TRANSPOSED, 8, lambda *_: None, lambda _: True)


def _with_other(step: Step, other: Value, result: Value | None) -> Step | None:
    x, packed, bias, *geometry = step.arguments[:7]
    arguments = [x, other, packed, bias, *geometry, '"add"', "none", "none", [], "none"]
    return Step(f"{PACKED}.binary", arguments, [result])
