"""Which dimensions of a tensor those of others are, behind views and copies of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..program import Step, Value
from .editor import VIEWS, Editor, is_same


@dataclass(frozen=True, eq=False)
class Axis:
    """A dimension of the tensor where a walk begins, or one along which that is repeated."""

    size: Any
    is_repeated: bool = False


Dim = tuple[Axis, ...]
"""A dimension that several became one in, the last of which changes fastest."""

_COPIES = ("aten::clone", "aten::contiguous", "aten::alias", "aten::detach")
_TURNS = ("aten::transpose.int", "aten::permute", "aten::t")
LAYOUT = (*VIEWS, *_COPIES, *_TURNS, "aten::unsqueeze", "aten::expand")
"""Steps whose results hold the same numbers in other dimensions."""


@dataclass
class Walk:
    """From a tensor through such steps: `dims` are those of the last result, of axes of the
    first, `base`, whose own are `axes`."""

    base: Value
    axes: tuple[Axis, ...]
    dims: list[Dim]

    @classmethod
    def to(cls, editor: Editor, value: Any) -> Walk | None:
        """The walk that ends at a value, from as far as its dimensions can be told; None where its
        shape is not known."""
        if not isinstance(value, Value) or value.meta is None:
            return None
        steps: list[Step] = []
        first = value
        while (maker := editor.maker.get(first)) is not None and knows(maker):
            if maker.arguments[0].meta is None or maker.results[0].meta is None:  # type: ignore[union-attr]
                break
            steps.append(maker)
            first = maker.arguments[0]
        walk = cls.begin(first)
        for step in reversed(steps):
            if not walk.take(step):
                walk = cls.begin(step.results[0])  # type: ignore[arg-type]
        return walk

    @classmethod
    def begin(cls, value: Value) -> Walk:
        """Of a tensor alone."""
        assert value.meta is not None
        axes = tuple(Axis(size) for size in value.meta.shape)
        return cls(value, axes, [(axis,) for axis in axes])

    def copy(self) -> Walk:
        """The same, to go on from."""
        return Walk(self.base, self.axes, [*self.dims])

    @property
    def flat(self) -> list[Axis]:
        """The axes in the order of memory, of a tensor that lies in torch's order."""
        return [axis for dim in self.dims for axis in dim]

    def take(self, step: Step) -> bool:
        """Go through a step of LAYOUT; False, and nothing is changed, where it makes dimensions
        that are parts of others."""
        result = step.results[0]
        if result is None or result.meta is None:
            return False
        dims = self._after(step, result.meta.shape)
        if dims is None or len(dims) != len(result.meta.shape):
            return False
        self.dims = dims
        return True

    def _after(self, step: Step, shape: Sequence[Any]) -> list[Dim] | None:
        dims, words = self.dims, step.arguments[1:]
        count = len(dims)
        if step.target in _COPIES:
            return dims
        if step.target in VIEWS:
            return _regrouped(self.flat, shape)
        if step.target == "aten::unsqueeze":
            place = int(words[0]) % (count + 1)
            return [*dims[:place], (), *dims[place:]]
        if step.target == "aten::expand":
            return _expanded(dims, shape)
        order = [*range(count)]
        if step.target == "aten::permute":
            order = [int(word) % count for word in words[0]]
        else:
            a, b = (int(w) % count for w in words[:2]) if words else (0, count - 1)
            order[a], order[b] = order[b], order[a]
        return [dims[place] for place in order]


def knows(step: Step) -> bool:
    """Whether a step is one of LAYOUT."""
    return step.target in LAYOUT and len(step.results) == 1


def _expanded(dims: list[Dim], shape: Sequence[Any]) -> list[Dim] | None:
    found: list[Dim] = [()] * (len(shape) - len(dims)) + dims
    for place, size in enumerate(shape):
        own = size_of(found[place])
        if is_same(own, size):
            continue
        if not is_same(own, 1):
            return None
        found[place] = (Axis(size, is_repeated=True),)
    return found


def size_of(axes: Sequence[Axis]) -> Any:
    """Of the dimension that several become one in."""
    size: Any = 1
    for axis in axes:
        size = size * axis.size
    return size


def _regrouped(flat: Sequence[Axis], shape: Sequence[Any]) -> list[Dim] | None:
    """The axes by the dimensions of a view; None where one is divided."""
    found: list[Dim] = []
    place = 0
    for number, size in enumerate(shape):
        dim: list[Axis] = []
        while not is_same(size_of(dim), size) or (
            is_same(size, 1) and not dim and place < len(flat) and is_same(flat[place].size, 1)
        ):
            if place == len(flat):
                return None
            dim.append(flat[place])
            place += 1
        after = shape[number + 1] if number + 1 < len(shape) else None
        if after is None or not is_same(after, 1):  # what has one element may be anywhere
            while place < len(flat) and is_same(flat[place].size, 1):
                dim.append(flat[place])
                place += 1
        found.append(tuple(dim))
    return found if place == len(flat) else None
