"""Pass that has steps that move elements move bytes.

Rounding the elements of a tensor and moving them gives the same bytes in either order. So where all
that take what such a step gives round it to the same bytes, it takes bytes itself: then layers
before it can give bytes, and less memory is moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..program import Argument, Some, Step, Value
from .editor import VIEWS, Editor
from .pooling import largest
from .quantized_layers import FLOATING, Numbers
from .quantized_times import CONVOLUTION_OF_BYTES, LINEAR_OF_BYTES, QUANTIZE

OTHER = {LINEAR_OF_BYTES: 8, CONVOLUTION_OF_BYTES: 9}
"""The place of what a layer of bytes adds."""
ADDS = {LINEAR_OF_BYTES: 9, CONVOLUTION_OF_BYTES: 14}
"""The place of the scale of what a layer of bytes adds, before its zero point."""
_WHOLE = (
    *VIEWS, "aten::permute", "aten::transpose.int", "aten::t", "aten::squeeze", "aten::squeeze.dim",
    "aten::squeeze.dims", "aten::unsqueeze", "aten::flatten.using_ints", "aten::contiguous",
    "aten::clone", "aten::channel_shuffle", "aten::native_channel_shuffle", "aten::pixel_shuffle",
    "aten::pixel_unshuffle", "aten::flip", "aten::roll", "aten::rot90",
)  # fmt: skip
"""Steps whose result has all elements of their first argument, each once."""
_PARTS = (
    "aten::slice.Tensor", "aten::select.int", "aten::split.Tensor", "aten::split_with_sizes",
    "aten::unbind.int", "aten::diagonal", "aten::index_select", "aten::index.Tensor",
    "aten::gather", "aten::amax",
)  # fmt: skip
"""Steps whose results have some of them."""
_REPEATED = ("aten::expand", "aten::repeat", "aten::unfold", "aten::_unsafe_index.Tensor")
"""Steps whose result has some of them more than once."""
_NEAREST = tuple(
    f"aten::{name}{dims}d.vec"
    for name in ("upsample_nearest", "_upsample_nearest_exact")
    for dims in (1, 2, 3)
)
"""The same, which torch does not have for signed bytes."""
MOVES = (*_WHOLE, *_PARTS, *_REPEATED)
"""Steps whose results have elements of their first argument alone."""
_JOINED = ("aten::cat", "aten::stack")
"""Steps whose result has the elements of a list of tensors."""
_PAD = "aten::pad"
_RELU = "aten::relu"

Bytes = tuple[str, str, str]
"""Scale, zero point and dtype, as they are written in a step."""


def move(editor: Editor) -> None:
    """Have steps that move elements move bytes, where all that take what they give round it."""
    moves = _Moves(editor)
    for step in editor.steps.steps:
        moves.take(step)
    editor.apply()


def groups_of_moved(editor: Editor) -> list[set[Value]]:
    """The values that share elements by steps that move these."""
    groups: dict[Value, set[Value]] = {}
    for step in editor.steps.steps:
        if moves_elements(step) or largest(step) is not None:
            values = {value for value in (*sources_of(step), *step.results) if value is not None}
            joined = set().union(values, *(groups.get(value, ()) for value in values))
            groups.update(dict.fromkeys(joined, joined))
    return [*{id(group): group for group in groups.values()}.values()]


def of_bytes(value: Value, dtype: torch.dtype) -> Value:
    """A value of bytes in the shape and order of another one."""
    meta = value.meta
    if meta is None:
        return Value()
    return Value(meta=meta.new_empty_strided(meta.shape, meta.stride(), dtype=dtype))


def as_numbers(scale: str, zero_point: str, dtype: str) -> Numbers:
    """What bytes stand for, as it is written in a step that rounds."""
    return Numbers(float(scale), int(zero_point), dtype.strip('"'))


def is_cast(step: Step) -> bool:
    """Whether a step changes the dtype alone, from one floating dtype to another."""
    others = {"aten::_to_copy": slice(2, 5), "aten::to.dtype": slice(4, 5)}.get(step.target)
    if others is None or any(word != "none" for word in step.arguments[others]):
        return False
    metas = [None if v is None else v.meta for v in (step.arguments[0], step.results[0])]
    return all(meta is not None and meta.dtype in FLOATING for meta in metas)


def adds(step: Step, value: Value) -> bool:
    """Whether a layer of bytes adds a value, and takes it for nothing else."""
    place = OTHER.get(step.target)
    if place is None or sum(each is value for each in step.taken) != 1:
        return False
    other = step.arguments[place]
    return isinstance(other, Some) and other.item is value


def with_added_bytes(step: Step, bytes_: Value, scale: Argument, zero_point: Argument) -> Step:
    """A layer of bytes that adds bytes in place of numbers."""
    arguments, place = [*step.arguments], ADDS[step.target]
    arguments[OTHER[step.target]] = Some(bytes_)
    arguments[place : place + 2] = [Some(scale), zero_point]
    return step.with_arguments(arguments)


def moves_elements(step: Step) -> bool:
    """Whether the results of a step have elements of `sources_of` it, and zeros."""
    if not step.arguments:
        return False
    if step.target == _PAD:
        _, _, mode, fill = step.arguments
        is_zero = not isinstance(fill, Some) or float(fill.item) == 0
        return is_zero and mode == '"constant"'
    return step.target in (*MOVES, *_NEAREST, *_JOINED, _RELU) or is_cast(step)


def sources_of(step: Step) -> list[Value]:
    """What a step moves."""
    first = step.arguments[0]
    return [*first] if isinstance(first, list) else [first]


class _Moves:
    """The bytes of values so far, while steps are looked at one after the other."""

    def __init__(self, editor: Editor) -> None:
        self._editor = editor
        self._wanted: dict[Value, Bytes | None] = {}
        self._made: dict[tuple[Value, Bytes], Value] = {}

    def take(self, step: Step) -> None:
        """Change a step, if it shall take or give bytes."""
        if step.target == QUANTIZE:
            self._round(step)
        elif step.target in OTHER:
            self._add(step)
        elif (numbers := self._given(step)) is not None and self._may_move(step, numbers):
            self._move(step, numbers)

    def _round(self, step: Step) -> None:
        (result,) = step.results
        assert result is not None
        bytes_ = self._made.setdefault((step.arguments[0], _numbers(step)), result)
        if bytes_ is not result:
            self._editor.replace(step)
            self._editor.redirect(result, bytes_)

    def _add(self, step: Step) -> None:
        other = step.arguments[OTHER[step.target]]
        if not isinstance(other, Some) or not adds(step, other.item):
            return
        numbers = self._wants(other.item)
        maker = self._editor.maker.get(other.item)
        if numbers is not None and maker is not None and self._editor.is_changed(maker):
            bytes_ = self._made[other.item, numbers]
            self._editor.replace(step, with_added_bytes(step, bytes_, *numbers[:2]))

    def _may_move(self, step: Step, numbers: Bytes) -> bool:
        """Whether bytes are moved: not, if more would be rounded than is moved."""
        is_part = step.target in _PARTS or largest(step) is not None
        return not is_part or self._wants(step.arguments[0]) == numbers

    def _move(self, step: Step, numbers: Bytes) -> None:
        made: list[Step] = []
        sources = [self._bytes(source, numbers, made) for source in sources_of(step)]
        if self._keeps(step, numbers):
            results: list[Value | None] = [*sources]
        else:
            dtype = as_numbers(*numbers).torch_dtype
            moved = self._moved(step, sources, numbers)
            results = [None if v is None else of_bytes(v, dtype) for v in moved.results]
            made.append(replace(moved, results=results))
        for value, bytes_ in zip(step.results, results, strict=False):
            if value is not None and bytes_ is not None:
                self._made[value, numbers] = bytes_
        self._editor.replace(step, *made)

    def _moved(self, step: Step, sources: list[Value], numbers: Bytes) -> Step:
        """The same step over bytes."""
        step = largest(step) or step
        first, *rest = step.arguments
        if step.target == _PAD:
            rest[-1] = Some(f"{numbers[1]}.0")
        if step.target == _RELU:
            least = Value()
            zero_point, dtype = int(numbers[1]), as_numbers(*numbers).torch_dtype
            self._editor.steps.constants[least] = torch.tensor(
                zero_point, dtype=dtype, device="cpu"
            )
            return Step("aten::maximum", [*sources, least], step.results)
        return step.with_arguments([sources if isinstance(first, list) else sources[0], *rest])

    @staticmethod
    def _keeps(step: Step, numbers: Bytes) -> bool:
        """Whether a step keeps all bytes: rounding clamps as a ReLU does if no byte is less."""
        return is_cast(step) or (step.target == _RELU and numbers[1:] == ("0", '"uint8"'))

    def _bytes(self, source: Value, numbers: Bytes, made: list[Step]) -> Value:
        """The bytes of a value; made: gets the step that rounds it, if there is none."""
        if (source, numbers) not in self._made:
            bytes_ = self._made[source, numbers] = of_bytes(
                source, as_numbers(*numbers).torch_dtype
            )
            made.append(Step(QUANTIZE, [source, *numbers], [bytes_]))
        return self._made[source, numbers]

    def _given(self, step: Step) -> Bytes | None:
        """The bytes that all results of a step become, if it moves elements."""
        if not (moves_elements(step) or self._takes_largest(step)):
            return None
        if not all(s.meta is not None and s.meta.dtype in FLOATING for s in sources_of(step)):
            return None
        editor = self._editor
        taken = [v for v in step.results if v in editor.takers or v in editor.outputs]
        ways = {self._wants(value) for value in taken if value is not None}
        found = ways.pop() if len(ways) == 1 else None
        is_signed = found is not None and found[2] != '"uint8"'
        return None if step.target in _NEAREST and is_signed else found

    def _wants(self, value: Value) -> Bytes | None:
        """The bytes that all become which take a value."""
        if value not in self._wanted:
            self._wanted[value] = self._bytes_of_takers(value)
        return self._wanted[value]

    def _bytes_of_takers(self, value: Value) -> Bytes | None:
        takers = self._editor.takers.get(value, [])
        if value in self._editor.outputs or not takers:
            return None
        ways = {*self._ways(value, takers)}
        return ways.pop() if len(ways) == 1 else None

    def _ways(self, value: Value, takers: list[Step]) -> Iterator[Bytes | None]:
        for taker in takers:
            if taker.target == QUANTIZE:
                yield _numbers(taker)
            elif not adds(taker, value):
                is_moved = value in sources_of(taker) if taker.arguments else False
                yield self._given(taker) if is_moved else None

    def _takes_largest(self, step: Step) -> bool:
        """Whether a step takes the largest values of what convolutions of bytes give: the largest
        of numbers, rounded, is the largest of rounded ones."""
        if largest(step) is None:
            return False
        maker = self._editor.maker.get(step.arguments[0])
        is_convolution = maker is not None and maker.target == CONVOLUTION_OF_BYTES
        return is_convolution or (maker is not None and self._takes_largest(maker))


def _numbers(step: Step) -> Bytes:
    scale, zero_point, dtype = step.arguments[1:]
    return scale, zero_point, dtype
