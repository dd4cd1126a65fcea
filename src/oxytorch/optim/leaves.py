"""What arguments and results of torch's functions hold: as torch's pytree, which takes longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree

_LEAVES = frozenset({int, float, bool, str, type(None)})


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with each leaf changed."""
    kind = type(value)
    if kind in _LEAVES or isinstance(value, Tensor):
        return change(value)
    if kind is tuple or kind is list:
        return kind([mapped(change, item) for item in value])
    if kind is dict:
        return {key: mapped(change, item) for key, item in value.items()}
    return _pytree.tree_map(change, value)


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of `value`."""
    kind = type(value)
    if kind in _LEAVES or isinstance(value, Tensor):
        yield value
    elif kind is tuple or kind is list:
        for item in value:
            yield from leaves(item)
    elif kind is dict:
        for item in value.values():
            yield from leaves(item)
    else:
        yield from _pytree.tree_leaves(value)
