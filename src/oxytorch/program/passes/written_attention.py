"""Pass over attention that is written out: two products of matrices with a softmax between them.

What the products take is followed through views and copies (axes.py), so that all spellings are
one: `matmul` of four dimensions, `bmm` and `baddbmm` of three, `einsum`, keys that are repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..program import Argument, Some, Step, Value
from .attention import OURS, pays_written_out
from .axes import Axis, Dim, Walk, knows, size_of
from .editor import VIEWS, Editor, are_same, is_same

PRODUCTS = ("aten::bmm", "aten::matmul")
_SOFTMAX = ("aten::_softmax", "aten::softmax.int")
HIDDEN = -1e8
"""A number that replaces the scores of hidden keys is at most this, below any score."""
_OTHER = "its products are not those of attention"


@dataclass(frozen=True)
class _Places:
    """Where a number replaces scores, or where it does not (`is_else`)."""

    places: Value
    number: float
    is_else: bool


@dataclass
class _Scores:
    """What is between a product and the softmax. steps: those that move elements, in order. masks:
    with the scores that they were added to, from the last on."""

    product: Step
    scale: float
    masks: list[tuple[Value | _Places, Value]]
    steps: list[Step]


def written_attention(editor: Editor) -> None:
    """Have softmax(query key^T * scale + mask) value computed by the kernel of this package, where
    it is faster than these steps."""
    for step in editor.steps.steps:
        if step.target not in PRODUCTS:
            continue
        found = _softmax_before(editor, step)
        if found is not None:
            softmax, between = found
            why = _Place(editor, step, softmax, between).replaced()
            if why:
                editor.leave(softmax, why)
    editor.apply()


def _softmax_before(editor: Editor, product: Step) -> tuple[Step, list[Step]] | None:
    """The softmax whose result a product takes first, and the steps between them."""
    value, between = product.arguments[0], list[Step]()
    while True:
        maker = editor.maker.get(value)
        if maker is None or editor.only_taker(value) is None:
            return None
        if maker.target in _SOFTMAX:
            return maker, between[::-1]
        if not knows(maker) and not _is_cast(maker):
            return None
        between.append(maker)
        value = maker.arguments[0]


def _is_cast(step: Step) -> bool:
    """Whether a step gives floating-point numbers another floating-point dtype."""
    if step.target != "aten::_to_copy":
        return False
    metas = [getattr(value, "meta", None) for value in (step.arguments[0], step.results[0])]
    return all(meta is not None and meta.is_floating_point() for meta in metas)


def _is_like(value: Any, other: Value) -> bool:
    meta = value.meta if isinstance(value, Value) else None
    return meta is not None and other.meta is not None and are_same(meta.shape, other.meta.shape)


class _Place:
    """Attention that may be there.

    product: the second one.
    between: steps behind the softmax.
    """

    def __init__(
        self, editor: Editor, product: Step, softmax: Step, between: Sequence[Step]
    ) -> None:
        self._editor, self._product = editor, product
        self._softmax, self._between = softmax, between
        self._made: list[Step] = []

    def replaced(self) -> str:
        """Replace it; return why not, or nothing."""
        x, dim, _ = self._softmax.arguments
        if x.meta is None or dim not in ("-1", str(x.meta.dim() - 1)):
            return "it is over another dimension than the last"
        scores = self._scores(x)
        if scores is None:
            return "what it takes is no product of matrices with a scale and masks"
        first, second = scores.product.arguments, self._product.arguments
        walks = [Walk.to(self._editor, given) for given in (first[0], first[1], second[1])]
        if any(walk is None or len(walk.dims) not in (3, 4) for walk in walks):
            return _OTHER
        query, key, value = (walk for walk in walks if walk is not None)
        matrices = [dim for walk in (query, key, value) for dim in walk.dims[-2:]]
        if any(len(dim) != 1 for dim in matrices):
            return _OTHER
        (row,), (inner,), (inner_of_key,), (column,), (column_of_value,), (wide,) = matrices
        batch = _batch(query)
        is_attention = (
            len(batch) in (1, 2)
            and not any(axis.is_repeated for axis in (*batch, row, inner))
            and is_same(inner.size, inner_of_key.size)
            and is_same(column.size, column_of_value.size)
            and is_same(inner.size, wide.size)
        )
        if not is_attention:
            return _OTHER
        laid_out = self._layouts(scores, query, (row, column))
        if laid_out is None:
            return _OTHER
        taken = (
            self._heads(query, first[0], batch, (row, inner), False),
            self._heads(key, first[1], batch, (column, inner_of_key), True),
            self._heads(value, second[1], batch, (column_of_value, wide), False),
        )
        if any(each is None for each in taken):
            return _OTHER
        return self._written(taken, scores, laid_out, [*batch, row, column])

    def _scores(self, x: Value) -> _Scores | None:
        """What is between the first product and the softmax."""
        editor, scale, steps = self._editor, 1.0, list[Step]()
        masks: list[tuple[Value | _Places, Value]] = []
        while True:
            maker = editor.maker.get(x)
            if maker is None or editor.only_taker(x) is None or editor.is_changed(maker):
                return None
            if maker.target in PRODUCTS:
                return _Scores(maker, scale, masks, steps[::-1])
            if knows(maker) or _is_cast(maker):
                steps.append(maker)
                x = maker.arguments[0]
                continue
            factor = self._factor(maker, x)
            mask = self._mask(maker, x) if factor is None and scale == 1.0 else None
            if factor is not None:
                x, by = factor
                scale *= by
            elif mask is not None:
                masks.append((mask[1], x))
                x = mask[0]
            else:
                return None

    def _factor(self, step: Step, result: Value) -> tuple[Value, float] | None:
        """What is multiplied with a number, or divided by one, and that number."""
        if step.target not in ("aten::mul.Tensor", "aten::div.Tensor"):
            return None
        first, second = step.arguments
        is_product = step.target == "aten::mul.Tensor"
        for source, factor in ((first, second), *[(second, first)] * is_product):
            number = self._editor.number(factor)
            if number and _is_like(source, result):
                return source, float(number) if is_product else 1 / number
        return None

    def _mask(self, step: Step, result: Value) -> tuple[Value, Value | _Places] | None:
        """The scores that a mask is added to, or that a number replaces at some places; and which
        mask."""
        if step.target == "add" and step.arguments[2] == "1.0":
            first, second, _ = step.arguments
            for scores, mask in ((first, second), (second, first)):
                is_scores = _is_like(scores, result) and self._is_behind_product(scores)
                if is_scores and isinstance(mask, Value) and mask.meta is not None:
                    return scores, mask
            return None
        is_else = False
        if step.target == "aten::masked_fill.Tensor":
            scores, places, number = step.arguments
        elif step.target == "aten::where.self":
            places, number, scores = step.arguments
            is_else = self._editor.number(number) is None
            if is_else:
                number, scores = scores, number
        else:
            return None
        found = self._editor.number(number)
        is_known = isinstance(places, Value) and places.meta is not None
        if found is None or not found <= HIDDEN or not is_known or not _is_like(scores, result):
            return None
        if places.meta.dtype != torch.bool:
            return None
        return scores, _Places(places, float(found), is_else)

    def _scores_before(self, step: Step, result: Value) -> Value | None:
        """The scores that a step scales or masks."""
        found = self._factor(step, result) or self._mask(step, result)
        return None if found is None else found[0]

    def _is_behind_product(self, value: Value) -> bool:
        """Whether a value is made of a product by steps that the scores may go through."""
        maker = self._editor.maker.get(value)
        while maker is not None and maker.target not in PRODUCTS:
            before = self._scores_before(maker, value)
            if before is not None:
                value = before
            elif knows(maker) or _is_cast(maker):
                value = maker.arguments[0]
            else:
                return False
            maker = self._editor.maker.get(value)
        return maker is not None

    def _layouts(
        self, scores: _Scores, query: Walk, ends: tuple[Axis, Axis]
    ) -> dict[Value, list[Dim]] | None:
        """The dimensions of the scores that masks were added to; None where the softmax is of
        other rows, or the second product of others."""
        row, column = ends
        dims: list[Dim] = [*query.dims[:-2], (row,), (column,)]
        result = scores.product.results[0]
        assert result is not None
        walk = Walk(result, (), dims)
        after: dict[Value, list[Dim]] = {result: dims}
        made = {step.results[0]: step for step in scores.steps}
        for step in made.values():
            if not _is_cast(step) and not walk.take(step):
                return None
            after[step.results[0]] = walk.dims  # type: ignore[index]
        if walk.dims[-1] != (column,):
            return None
        for step in self._between:
            if not _is_cast(step) and not walk.take(step):
                return None
        if walk.dims[-2:] != dims[-2:] or _batch(walk) != _batch(query):
            return None
        return {given: self._dims_at(given, after) for _, given in scores.masks}

    def _dims_at(self, value: Value, after: dict[Value, list[Dim]]) -> list[Dim]:
        """The dimensions of scores, by what the steps that move elements gave before."""
        while value not in after:
            before = self._scores_before(self._editor.maker[value], value)
            assert before is not None
            value = before
        return after[value]

    def _heads(
        self,
        walk: Walk,
        operand: Value,
        batch: Sequence[Axis],
        ends: tuple[Axis, Axis],
        is_turned: bool,
    ) -> Value | None:
        """What a product takes as [batch, heads, length, dim], without copies where that can be.

        batch: of the queries.
        ends: the axes of length and dim.
        is_turned: whether the product takes them the other way round.
        """
        own = _batch(walk)
        kept = [*own]
        while kept and kept[-1].is_repeated:
            kept.pop()
        counts, wanted = ([axis.size for axis in each] for each in (own, batch))
        if not are_same(counts[: len(batch) - 1], wanted[:-1]):
            return None
        heads = size_of(own[len(batch) - 1 :])
        if not is_same(heads, wanted[-1]) or any(axis.is_repeated for axis in kept):
            return None
        order = [*kept, *ends]
        if len(kept) == len(batch) and {*order} == {*walk.axes} and len(order) == len(walk.axes):
            value = walk.base
            places = [walk.axes.index(axis) for axis in order]
            if places != sorted(places):
                meta: Any = value.meta
                value = self._make(
                    "aten::permute", [value, [*map(str, places)]], permuted(meta, places)
                )
        else:
            value = self._of_operand(operand, len(batch), wanted, is_turned)
        assert value.meta is not None
        if value.meta.dim() == 3:
            value = self._make("aten::unsqueeze", [value, "0"], value.meta.unsqueeze(0))
        return value

    def _of_operand(self, value: Value, count: int, sizes: Sequence[Any], is_turned: bool) -> Value:
        """The same from what the product takes. count, sizes: of the batch."""
        meta: Any = value.meta
        if is_turned:
            value = self._make("aten::transpose.int", [value, "-1", "-2"], meta.mT)
            meta = value.meta
        if meta.dim() == 3 and count == 2:
            words = ["-1", self._word(sizes[1], value, 0), *self._words(value, (1, 2))]
            meta = meta.new_empty((*sizes, *meta.shape[1:]))
            value = self._make("aten::reshape", [value, words], meta)
        return value

    def _make(self, target: str, arguments: list[Argument], meta: Any) -> Value:
        result = Value(meta=meta)
        is_view = target not in ("add", "aten::where.self")
        self._made.append(Step(target, arguments, [result], is_view=is_view))
        return result

    def _words(self, value: Value, places: Sequence[int]) -> list[Argument]:
        """Sizes of a tensor as arguments."""
        assert value.meta is not None
        return [self._word(value.meta.shape[place], value, place) for place in places]

    def _word(self, size: Any, value: Value, place: int) -> Argument:
        if type(size) is int:
            return str(size)
        found = Value(is_size=True)
        self._made.append(Step("size", [value, str(place)], [found]))
        return found

    def _written(
        self, taken: Any, scores: _Scores, layouts: dict[Value, list[Dim]], axes: list[Axis]
    ) -> str:
        query, key, value = taken
        mask: Value | None = None
        for given, met in scores.masks:
            made = self._laid_out(self._as_sum(given, query), layouts[met], axes, query)
            if made is None:
                return "a mask has other dimensions than the scores"
            mask = made if mask is None else self._sum(mask, made)
        metas = [each.meta for each in taken]
        if self._product.results[0].meta.dtype != metas[0].dtype:  # type: ignore[union-attr]
            return "its result is of another dtype"
        if not pays_written_out(metas, None if mask is None else mask.meta):
            return "the kernel was timed and is not faster, or does not take such tensors"
        batch, heads, length, dim = metas[0].shape
        lies = metas[0].new_empty((batch, length, heads, dim))
        by_head, rows = Value(meta=lies.transpose(1, 2)), Value(meta=lies)
        given_mask = "none" if mask is None else Some(mask)
        arguments = [query, key, value, given_mask, Some(repr(scores.scale)), "false", "true"]
        self._made.append(Step(OURS, arguments, [by_head]))
        turned = Step("aten::transpose.int", [by_head, "1", "2"], [rows], is_view=True)
        self._made.append(turned)
        self._give(by_head, rows, axes)
        return ""

    def _as_sum(self, given: Value | _Places, query: Value) -> Value:
        """A mask as what is added to scores."""
        if isinstance(given, Value):
            return given
        dtype = query.meta.dtype  # type: ignore[union-attr]
        hidden, shown = Value(), Value()
        lowest = torch.finfo(dtype).min if given.number > -torch.inf else given.number
        for each, number in ((hidden, lowest), (shown, 0.0)):
            self._editor.steps.constants[each] = torch.tensor(number, dtype=dtype, device="cpu")
        pair = [shown, hidden] if given.is_else else [hidden, shown]
        places: Any = given.places
        meta = query.meta.new_empty(places.meta.shape)  # type: ignore[union-attr]
        return self._make("aten::where.self", [places, *pair], meta)

    def _sum(self, first: Value, second: Value) -> Value:
        one: Any = first.meta
        other: Any = second.meta
        return self._make("add", [first, second, "1.0"], sum_of(one, other))

    def _laid_out(
        self, mask: Value, dims: list[Dim], axes: list[Axis], query: Value
    ) -> Value | None:
        """A mask of scores of these dimensions as one of [batch, heads, rows, columns], to which
        it broadcasts. axes: of the batch, rows and columns."""
        meta: Any = mask.meta
        single = [(axis,) for axis in axes]
        if dims == single or (meta.dim() <= 2 and dims[-2:] == single[-2:]):
            return mask
        is_of_batch = len(axes) == 4 and len(dims) == 3 and dims[-2:] == single[-2:]
        if not is_of_batch or [*dims[0]] != axes[:2]:
            return None
        if is_same(meta.shape[0], 1):
            return mask
        words = ["-1", *self._words(query, (1,)), *self._words(mask, (1, 2))]
        sizes = [axes[0].size, axes[1].size, *meta.shape[1:]]
        return self._make("aten::reshape", [mask, words], meta.new_empty(sizes))

    def _give(self, by_head: Value, rows: Value, axes: list[Axis]) -> None:
        """Make what the second product made. Where it is turned into rows, it is these already."""
        editor, (result,) = self._editor, self._product.results
        assert result is not None and result.meta is not None
        whole = result.meta.dim() == 4
        copied = result if whole else Value(meta=by_head.meta.contiguous())  # type: ignore[union-attr]
        word = Some("=contiguous_format")
        self._made.append(Step("aten::clone", [by_head, word], [copied]))
        if not whole:
            words = ["-1", *self._words(by_head, (2, 3))]
            self._made.append(Step("aten::reshape", [copied, words], [result], is_view=True))
        editor.replace(self._product, *self._made)
        walk = Walk.begin(result)
        wide = walk.axes[-1]
        self._rows_behind(
            result, Walk(result, (), self._dims_of_result(axes, wide)), rows, axes, wide
        )

    def _dims_of_result(self, axes: list[Axis], wide: Axis) -> list[Dim]:
        *batch, row, _ = axes
        result = self._product.results[0]
        is_single = len(batch) + 2 == result.meta.dim()  # type: ignore[union-attr]
        return [*([(axis,) for axis in batch] if is_single else [(*batch,)]), (row,), (wide,)]

    def _rows_behind(
        self, value: Value, walk: Walk, rows: Value, axes: list[Axis], wide: Axis
    ) -> None:
        *batch, row, _ = axes
        wanted = [*batch[:-1], row, batch[-1], wide]
        editor = self._editor
        for taker in editor.takers.get(value, []):
            result = taker.results[0] if knows(taker) else None
            if result is None or result in editor.outputs or editor.is_changed(taker):
                continue
            after = walk.copy()
            if not after.take(taker):
                continue
            if after.flat == wanted and taker.target in VIEWS:
                editor.replace(taker, Step("aten::reshape", [rows, taker.arguments[1]], [result]))
            elif after.dims == [(axis,) for axis in wanted] and taker.target == "aten::clone":
                if len(wanted) == 4:
                    editor.redirect(result, rows)
            else:
                self._rows_behind(result, after, rows, axes, wide)


def _batch(walk: Walk) -> list[Axis]:
    return [axis for dim in walk.dims[:-2] for axis in dim]


def permuted(meta: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """`meta.permute(places)`, which raises an error of torch's where sizes are symbols."""
    order = [*range(len(places))]
    for place, wanted in enumerate(places):
        other = order.index(wanted)
        order[place], order[other] = order[other], order[place]
        meta = meta.transpose(place, other)
    return meta


def sum_of(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`one + other`, which raises an error of torch's where sizes are symbols."""
    (longer, shorter) = (one, other) if one.dim() >= other.dim() else (other, one)
    count = longer.dim() - shorter.dim()
    pairs = zip(longer.shape[count:], shorter.shape, strict=True)
    sizes = [b if type(a) is int and a == 1 else a for a, b in pairs]
    shape = (*longer.shape[:count], *sizes)
    return one.new_empty(shape, dtype=torch.result_type(one, other))
