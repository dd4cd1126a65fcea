"""What modules are given and return, with the floating-point tensors in it converted."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_PLAIN = frozenset({int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device})
_DICTIONARIES = (dict, OrderedDict, defaultdict)


class Conversion:
    """Converts the floating-point tensors in values: each once, for a module may ask whether two
    of its arguments are one and the same.

    Tuples, named tuples, lists, dictionaries, data classes and packed sequences are looked into;
    what holds nothing to convert stays the very object.

    least_dims: dimensions that a tensor has to have for that.
    """

    def __init__(self, dtype: torch.dtype, least_dims: int = 0) -> None:
        self.dtype = dtype
        self.least_dims = least_dims
        self._found: dict[int, tuple[Any, Any]] = {}  # with the value, which keeps its id taken
        self._traced: list[tuple[Any, Any]] = []  # the same while torch's compiler looks on
        self._made: list[tuple[Any, Any, Any]] = []  # list or dictionary, its copy, and a copy

    def arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, converted."""
        return tuple([self(value) for value in args]), {k: self(v) for k, v in kwargs.items()}

    def __call__(self, value: Any) -> Any:
        """`value`, converted."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is Tensor and (value.dtype is self.dtype or not value.is_floating_point()):
            return value
        if torch.compiler.is_compiling():
            return self._converted_traced(value, kind)
        known = self._found.get(id(value))
        if known is not None:
            return known[1]
        self._found[id(value)] = value, value  # of what holds itself
        result = self._converted(value, kind)
        self._found[id(value)] = value, result
        return result

    def _converted_traced(self, value: Any, kind: type) -> Any:
        """The same without ids, which torch's compiler takes for constants."""
        for before, result in self._traced:
            if before is value:
                return result
        result = self._converted(value, kind)
        self._traced.append((value, result))
        return result

    def write_back(self) -> None:
        """Do to lists and dictionaries what was done to the copies that stood for them."""
        if not self._made:
            return
        pairs = [*self._found.values(), *self._traced]
        behind = {id(made): value for value, made in pairs}
        for value, made, before in self._made:
            if _is_unchanged(made, before):
                continue
            if isinstance(made, list):
                value[:] = [behind.get(id(item), item) for item in made]
            else:
                value.clear()
                value.update({key: behind.get(id(item), item) for key, item in made.items()})

    def _converted(self, value: Any, kind: type) -> Any:
        if isinstance(value, Tensor):
            takes = value.is_floating_point() and value.dim() >= self.least_dims
            return value.to(self.dtype) if takes else value
        if isinstance(value, PackedSequence):
            return value.to(self.dtype) if value.data.is_floating_point() else value
        if isinstance(value, tuple):
            return self._converted_tuple(value, kind)
        if kind is list or kind in _DICTIONARIES:
            return self._converted_container(value)
        if isinstance(value, UserDict):
            return _with(value, {"data": self(value.data)})
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            own = {
                field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)
            }
            return _with(value, {name: self(item) for name, item in own.items()})
        return value

    def _converted_tuple(self, value: Any, kind: Any) -> Any:
        items = [self(item) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        if kind is tuple:
            return tuple(items)
        return kind._make(items) if hasattr(kind, "_make") else value

    def _converted_container(self, value: Any) -> Any:
        made = value.copy()
        for place, item in enumerate(value) if isinstance(value, list) else value.items():
            made[place] = self(item)
        if _is_unchanged(made, value):
            return value
        self._made.append((value, made, made.copy()))
        return made


def converted(value: Any, dtype: torch.dtype) -> Any:
    """`value` with the floating-point tensors in it converted."""
    return Conversion(dtype)(value)


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in what `Conversion` looks into."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, PackedSequence):
        yield from floating_tensors(value.data)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from floating_tensors(item)
    elif isinstance(value, dict | UserDict):
        for item in value.values():
            yield from floating_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from floating_tensors(getattr(value, field.name, None))


def _is_unchanged(made: Any, before: Any) -> bool:
    """Whether a list or dictionary holds the very objects of another."""
    if len(made) != len(before):
        return False
    if isinstance(made, list):
        return all(map(operator.is_, made, before))
    return all(key in before and item is before[key] for key, item in made.items())


def _with(value: Any, items: dict[str, Any]) -> Any:
    """A copy of an object with other attributes, or itself where these are its own."""
    others = {k: item for k, item in items.items() if item is not getattr(value, k, None)}
    if not others:
        return value
    made = copy.copy(value)
    is_frozen = getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False)
    for name, item in others.items():
        object.__setattr__(made, name, item) if is_frozen else setattr(made, name, item)
    return made
