"""What packed tensors have besides values, as torch's compiler compares and keeps it."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Fields:
    """The class of a packed tensor and its fields, as what a compiled graph was made for.

    Tensors among the fields are compared by identity and never copied: they are the weight itself.
    """

    __slots__ = ("kind", "values")

    def __init__(self, kind: type[Tensor], values: dict[str, Any]) -> None:
        self.kind = kind
        self.values = values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fields):
            return NotImplemented
        return self.kind is other.kind and _are_same(self.values, other.values)

    def __hash__(self) -> int:
        return hash((self.kind, *self.values))

    def __deepcopy__(self, memo: dict[int, Any]) -> Fields:
        return self


def _are_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) or type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return bool(one == other)
