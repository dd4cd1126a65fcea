"""Pass over linear layers that share an input: one product with their weights joined."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...rewriting.measure import Product, about, calls_of, first_win, numbers, rows_of
from ..program import Argument, Some, Step, Value, values_of
from . import linear, panels
from .attention import OURS, TORCHS, WHOLE
from .editor import VIEWS, Editor, is_contiguous, known, takes_any_order
from .linear import LINEAR, Make, within_program
from .post_ops import activation, other_of_sum

JOINED = "program joined"
"""What times of joined layers are called."""
SPLIT = "aten::split_with_sizes"
_STRIDED = frozenset(
    [
        "add", "size", "aten::mul.Tensor", "aten::neg", "aten::bmm", "aten::cat", "aten::clone",
        "oxytorch::silu_mul", "oxytorch::gelu_mul", "oxytorch::layer_norm", "oxytorch::rms_norm",
        "oxytorch::add_layer_norm", "oxytorch::add_rms_norm",
        OURS, TORCHS, WHOLE,
    ]
)  # fmt: skip
"""Steps that are as fast where rows lie apart in memory; others may copy them first."""

_SIZES = ("aten::size", "aten::dim")
"""Nodes of TorchScript that take a tensor in any order; of others nothing is known."""


@dataclass(frozen=True, eq=False)
class _Layer:
    """A linear layer that may be joined.

    after: the activation that alone takes its result, if there is one.
    result: what others take.
    views: the steps that take the result, or a view of it, in another shape.
    is_copied: whether the result is copied where it lies among others.
    """

    step: Step
    after: Step | None
    result: Value
    views: tuple[Step, ...]
    is_copied: bool

    @property
    def weight(self) -> Value:
        found: Value = self.step.arguments[1]
        return found

    @property
    def key(self) -> Hashable:
        """What layers that can be joined have in common."""
        x, weight, _ = self.step.arguments
        after = None if self.after is None else (self.after.target, *self.after.arguments[1:])
        return x, weight.meta.dtype, after


def linear_layers(editor: Editor) -> None:
    """Compute linear layers of one input as one product, where that is faster."""
    _join(editor, _fastest)


def storable_linear_layers(editor: Editor) -> None:
    """The same where packed weights have to be plain tensors."""
    _join(editor, _fastest_storable)


def _join(editor: Editor, fastest: Callable[[Any, Any], Make]) -> None:
    by_weights: dict[tuple[Value, ...], list[list[_Layer]]] = {}
    weights_of: dict[Step, tuple[Value, ...]] = {}
    for group in _groups(editor):
        weights = tuple(layer.weight for layer in group)
        weights_of.update((layer.step, weights) for layer in group)
        by_weights.setdefault(weights, []).append(group)
    for weights, groups in by_weights.items():
        why = ""
        takers = {taker for weight in weights for taker in editor.takers[weight]}
        if any(each.target == LINEAR and weights_of.get(each) != weights for each in takers):
            why = "its weight is taken by another layer, too, which would keep a copy of it"
        elif not all(_pays(group, fastest) for group in groups):
            why = "a joined product was timed and is not faster"
        joined = _joined_weight(weights)
        for number, group in enumerate(groups):
            if why:
                for layer in group:
                    editor.leave(layer.step, why)
            else:
                _replace(editor, group, joined, makes_weight=not number)
    # A joined weight is made before the first layer, though parts of it were made after it.
    editor.steps.steps.sort(key=lambda step: not editor.lasts(step))
    editor.apply()


def _groups(editor: Editor) -> list[list[_Layer]]:
    """The layers that share an input, and can be joined."""
    found: dict[Hashable, list[_Layer]] = {}
    for step in editor.steps.steps:
        if step.target != LINEAR or editor.lasts(step):
            continue
        sharing = [each for each in editor.takers[step.arguments[0]] if each.target == LINEAR]
        if len(sharing) == 1:
            continue
        layer = _layer(editor, step)
        if isinstance(layer, str):
            editor.leave(step, f"its input is shared, but {layer}")
        else:
            found.setdefault(layer.key, []).append(layer)
    return [group for group in found.values() if len(group) > 1]


def _layer(editor: Editor, step: Step) -> _Layer | str:
    """A layer that may be joined, or why it cannot."""
    x, weight, bias = step.arguments
    result: Any = step.results[0]
    given = [weight, *values_of(bias)]
    if any(value not in editor.lasting for value in given):
        return "its weight or bias is computed at each call"
    metas = [None if value is None else value.meta for value in (weight, *given, x, result)]
    meta: Any = metas[0]
    if any(each is None or each.dtype != meta.dtype for each in metas):
        return "input, weight and bias are not known, or differ in dtype"
    if meta.dim() != 2 or known(meta.shape) is None or 0 in (*meta.shape, *x.meta.shape):
        return "its weight is no matrix of a known size, or its input is empty"
    if not is_contiguous(result):
        return "its result does not lie in torch's order"
    after = editor.only_taker(result)
    if other_of_sum(after, result) is not None:
        return "a sum follows it, which is computed in the sweep of the layer"
    if after is not None and (activation(after) or after.target == "aten::relu"):
        result = after.results[0]
        if not is_contiguous(result):
            return "an activation that follows it makes a result in another order"
    else:
        after = None
    takers = [*_takers(editor, result)]
    if result in editor.outputs or any(v in editor.outputs for v in _views_of(takers)):
        return "its result is returned"
    if not all(map(_takes_rows_apart, takers)):
        return "another step depends on how its result lies in memory"
    views = tuple(taker for taker in takers if taker.target in VIEWS[:2])
    is_copied = any(_copies(taker, meta.shape[0]) for taker in takers)
    return _Layer(step, after, result, views, is_copied)


def _takers(editor: Editor, value: Value) -> Iterator[Step]:
    """The steps that take a value, or a view of it."""
    for taker in editor.takers.get(value, []):
        yield taker
        if _is_view(taker):
            for other in taker.results:
                if other is not None:
                    yield from _takers(editor, other)


def _is_view(step: Step) -> bool:
    return step.is_view or step.target in VIEWS


def _views_of(takers: Sequence[Step]) -> Iterator[Value | None]:
    return (value for taker in takers if _is_view(taker) for value in taker.results)


def _takes_rows_apart(step: Step) -> bool:
    """Whether a step computes the same of a tensor whose rows do not follow each other."""
    is_known = not step.target.startswith("script::") or step.target.endswith(_SIZES)
    return is_known and takes_any_order(step)


def _copies(step: Step, width: int) -> bool:
    """Whether a step copies a layer's result, of this width, where that lies among others."""
    if not _is_view(step):
        return step.target not in _STRIDED and not step.target.startswith("script::")
    if not is_contiguous(step.arguments[0]):
        return False
    if step.target not in VIEWS:
        return step.target == "aten::contiguous"
    elements, made = 1, step.results[0]
    for size in reversed(() if made is None or made.meta is None else made.meta.shape):
        if elements == width or type(size) is not int:
            break
        elements *= size
    return elements != width


def _pays(group: Sequence[_Layer], fastest: Callable[[Any, Any], Make]) -> bool:
    """Whether the joined product, split, is faster than those of the layers."""
    x = group[0].step.arguments[0].meta
    metas: list[Any] = [layer.weight.meta for layer in group]
    sizes, width = [meta.shape[0] for meta in metas], metas[0].shape[1]
    total = sum(sizes)
    copied = [layer.is_copied for layer in group]
    rows = rows_of(known(x.shape), total * width)
    makers = [fastest(x, meta) for meta in metas]
    together = fastest(x, metas[0].new_empty((total, width)))
    names = tuple(make.__name__ for make in (*makers, together))
    key = (JOINED, tuple(map(about, sizes)), about(width), metas[0].dtype, x.dim(), rows)

    def split(result: Value) -> list[Step]:
        parts = [Value() for _ in sizes]
        steps = [Step(SPLIT, [result, [*map(str, sizes)], "-1"], [*parts], returns_list=True)]
        for part, own in zip(parts, copied, strict=True):
            if own:
                steps.append(Step("aten::clone", [part, Some("=contiguous_format")], [Value()]))
        return steps

    def both() -> tuple[Product, Product]:
        weights = [numbers(size, width, dtype=metas[0].dtype) for size in sizes]
        whole = torch.cat(weights)
        pairs = [*zip(makers, weights, strict=True)]
        apart = within_program(lambda: [make(weight) for make, weight in pairs], whole.nbytes)
        return apart, within_program(lambda: [together(whole)], whole.nbytes, split)

    calls = calls_of(both, width, [1] * x.dim(), metas[0].dtype)
    return first_win((*key, names, tuple(copied)), [calls(count) for count in rows]) == 0


def _fastest(x: Any, weight: Any) -> Make:
    """How a layer is computed by the passes that follow."""
    if _fastest_storable(x, weight) is linear.panels_call and panels.beats_packed(x, weight):
        return linear.panels_call
    is_packed = not linear.why_not_packed(weight) and linear.pays(x, weight)
    return linear.packed_call if is_packed else linear.plain_call


def _fastest_storable(x: Any, weight: Any) -> Make:
    is_in_panels = linear.fits_panels(weight) and panels.pays(x, weight)
    return linear.panels_call if is_in_panels else linear.plain_call


def _joined_weight(weights: Sequence[Value]) -> Value:
    metas: list[Any] = [weight.meta for weight in weights]
    return Value(meta=metas[0].new_empty((sum(m.shape[0] for m in metas), metas[0].shape[1])))


def _replace(editor: Editor, group: Sequence[_Layer], weight: Value, makes_weight: bool) -> None:
    """Put one product in the place of the first layer."""
    first, *others = group
    weights: list[Argument] = [layer.weight for layer in group]
    steps = [Step("aten::cat", [weights, "0"], [weight])] if makes_weight else []
    bias = _joined_bias(editor, group, steps)
    meta: Any = first.result.meta
    sizes = [_outputs(layer) for layer in group]
    full = meta.new_empty((*meta.shape[:-1], sum(sizes)))
    made = Value(meta=full)
    steps.append(Step(LINEAR, [first.step.arguments[0], weight, bias], [made]))
    if first.after is not None:
        target, rest = first.after.target, first.after.arguments[1:]
        before, made = made, Value(meta=full)
        steps.append(Step(target, [before, *rest], [made]))
    # Other copies of the steps know the layers' own values, which lie otherwise.
    # Not `full.split`: torch 2.13 cannot split a tensor whose sizes are symbols.
    shapes = [(*full.shape[:-1], size) for size in sizes]
    results = [Value(meta=full.new_empty_strided(own, full.stride())) for own in shapes]
    words = [str(size) for size in sizes]
    steps.append(Step(SPLIT, [made, words, "-1"], results, returns_list=True, is_view=True))
    editor.replace(first.step, *steps)
    for layer, own in zip(group, results, strict=True):
        editor.redirect(layer.result, own)
    for step in (*(layer.step for layer in others), *(layer.after for layer in group)):
        if step is not None:
            editor.replace(step)
    for layer in group:
        for view in layer.views:
            editor.replace(view, replace(view, target=VIEWS[2]))


def _outputs(layer: _Layer) -> int:
    meta: Any = layer.weight.meta
    return int(meta.shape[0])


def _joined_bias(editor: Editor, group: Sequence[_Layer], steps: list[Step]) -> Argument:
    """The joined bias, with zeros where a layer has none, and the step that makes it."""
    own = [layer.step.arguments[2] for layer in group]
    if all(bias == "none" for bias in own):
        return "none"
    parts: list[Argument] = []
    meta: Any = group[0].weight.meta
    for bias, layer in zip(own, group, strict=True):
        if isinstance(bias, Some):
            parts.append(bias.item)
        else:
            parts.append(Value())
            editor.steps.constants[parts[-1]] = torch.zeros(
                _outputs(layer), dtype=meta.dtype, device="cpu"
            )
    joined = Value(meta=meta.new_empty(sum(map(_outputs, group))))
    steps.append(Step("aten::cat", [parts, "0"], [joined]))
    return Some(joined)
