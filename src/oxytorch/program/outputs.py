"""What a module returns: containers and objects, which are rebuilt around tensors."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..graph.errors import CaptureError

CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
"""What a structure may hold besides tensors, since it cannot change."""


class _Opened:
    """An object by its class and attributes; what is made of it is such an object."""

    def __init__(self, kind: type, attributes: dict[str, Any]) -> None:
        self.kind, self.attributes = kind, attributes


def _closed(values: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    kind, names = context
    made: Any = object.__new__(kind)
    made.__dict__.update(zip(names, values, strict=True))
    return made


pytree._private_register_pytree_node(
    _Opened,
    lambda opened: ([*opened.attributes.values()], (opened.kind, tuple(opened.attributes))),
    _closed,
)


class OutputStructure:
    """What a module's output is made of. Raises CaptureError for what may carry state."""

    def __init__(self, value: Any) -> None:
        leaves, self._spec = _taken_apart(value)
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._is_tensor = isinstance(value, Tensor)
        again = pytree.tree_unflatten(leaves, self._spec)
        if [*map(type, _nodes(again))] != [*map(type, _nodes(value))]:
            raise CaptureError(f"its output is a {type(value).__name__}, which torch takes apart")

    def is_like(self, value: Any) -> bool:
        """Whether another output differs in its tensors alone. Raises CaptureError."""
        leaves, spec = _taken_apart(value)
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        return (spec, places) == (self._spec, self._places) and all(
            type(one) is type(other) and one == other
            for one, other in zip(self._leaves, others, strict=True)
        )

    def rebuilt(self, tensors: list[Tensor]) -> Any:
        """The same structure with other tensors."""
        if self._is_tensor:
            return tensors[0]
        leaves = self._leaves.copy()
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self._spec)


def output_tensors(value: Any) -> list[Tensor]:
    """The tensors of an output, in order. Raises CaptureError for what may carry state."""
    return [leaf for leaf in _taken_apart(value)[0] if isinstance(leaf, Tensor)]


def containers(nested: Any) -> list[Any]:
    """The lists, dictionaries and objects in a value, which can be written to."""
    return [own for own in _nodes(nested) if isinstance(own, (list, dict)) or _is_open(own)]


def _taken_apart(value: Any) -> tuple[list[Any], Any]:
    leaves, spec = pytree.tree_flatten(_opened(value, set()), _is_size)
    for leaf in leaves:
        is_class = isinstance(leaf, type)
        if not (type(leaf) is Tensor or isinstance(leaf, CONSTANTS) or is_class):
            raise CaptureError(f"its output holds a {type(leaf).__name__}")
        is_watched = type(leaf) is Tensor or isinstance(leaf, (int, float, str))
        if is_watched and getattr(leaf, "__dict__", None) and not isinstance(leaf, enum.Enum):
            raise CaptureError(f"its output holds a {type(leaf).__name__} with attributes")
    return leaves, spec


def _opened(value: Any, seen: set[int]) -> Any:
    """The same structure with objects taken apart, however deep they lie."""

    def open_(leaf: Any) -> Any:
        if not _is_open(leaf):
            return leaf
        if id(leaf) in seen:
            raise CaptureError(f"its output holds a {type(leaf).__name__} twice")
        seen.add(id(leaf))
        return _Opened(type(leaf), {k: _opened(v, seen) for k, v in vars(leaf).items()})

    return pytree.tree_map(open_, value, is_leaf=_is_size)


def _is_open(value: Any) -> bool:
    """Whether an object is no more than its class and its attributes."""
    kind: Any = type(value)
    if isinstance(value, (Tensor, type, torch.nn.Module, *CONSTANTS)) or kind in _KNOWN:
        return False
    is_plain = kind.__new__ is object.__new__ and kind.__reduce_ex__ is object.__reduce_ex__
    slots = any(k.__dict__.get("__slots__") for k in kind.__mro__)
    own = "__getstate__" in dir(kind) and kind.__getstate__ is not _get_state
    hidden = own or "__reduce__" in _defined(kind) or "__del__" in _defined(kind)
    return (
        is_plain and not slots and not hidden and isinstance(getattr(value, "__dict__", None), dict)
    )


def _defined(kind: type) -> Iterator[str]:
    return (name for each in kind.__mro__[:-1] for name in each.__dict__)


_get_state = getattr(object, "__getstate__", None)
_KNOWN = (list, tuple, dict, set)


def _is_size(value: Any) -> bool:
    return type(value) is torch.Size  # which torch takes for a tuple


def _nodes(nested: Any) -> list[Any]:
    """A value and all that the containers and objects in it hold."""
    found = [nested]
    if isinstance(nested, dict):
        nested = [*nested.values()]
    elif _is_open(nested):
        nested = [*vars(nested).values()]
    if isinstance(nested, (tuple, list)) and not _is_size(nested):
        found += [inner for item in nested for inner in _nodes(item)]
    return found
