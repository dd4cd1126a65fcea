"""Numbers that depend on the sizes of a call's inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from . import conditions


class Sized:
    """A number that depends on the sizes of inputs."""

    def of(self, values: Sequence[Any]) -> Any:
        """Its value, where the sizes of inputs have these."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it comes to")


@dataclass(frozen=True)
class Formula(Sized):
    """factor * the product of some sizes + rest; sizes: the numbers of those of inputs, and others
    that are rounded down."""

    factor: int
    sizes: tuple[int | Rounded, ...]
    rest: int

    def of(self, values: Sequence[Any]) -> Any:
        return self.factor * math.prod(size_of(each, values) for each in self.sizes) + self.rest


@dataclass(frozen=True)
class Rounded(Sized):
    """(formula + rest) // divisor: what an operator with strides makes of a size."""

    formula: Formula
    rest: int
    divisor: int

    def of(self, values: Sequence[Any]) -> Any:
        return (self.formula.of(values) + self.rest) // self.divisor


@dataclass(frozen=True)
class Computed(Sized):
    """What a run on symbols computes of sizes.

    text: as Python; data: the same as an operand of a condition.
    """

    text: str
    data: Any = field(compare=False)

    def of(self, values: Sequence[Any]) -> Any:
        return conditions.value(self.data, values)


def size_of(size: int | Rounded, values: Sequence[Any]) -> Any:
    """The value of a size of inputs, by its number, or of one that is rounded down."""
    return size.of(values) if isinstance(size, Rounded) else values[size]
