"""What a run of a module can write to, compared afterwards."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import nn

from ..core.sources import MISSING
from ..core.watched import PLAIN
from .inputs import ModuleCall


class Before:
    """What a run of a module can write to, as it was before."""

    def __init__(self, module: nn.Module, call: ModuleCall) -> None:
        self._inputs = [(t, t.detach().clone()) for t in call.tensors]
        plain = (t for t in (*module.parameters(), *module.buffers()) if type(t) in PLAIN)
        self._held = [(t, t._version) for t in plain if not t.is_inference()]
        owned = [m.__dict__ for m in module.modules()]
        inner = [v for own in owned for v in own.values() if isinstance(v, (dict, list, set))]
        self._tables: list[tuple[Any, Any]] = [
            (table, _copied(table)) for table in (*owned, *inner)
        ]

    def holds(self) -> bool:
        """Whether nothing was written to."""
        return (
            all(t._version == version for t, version in self._held)
            and all(_is_same(now, then) for now, then in self._tables)
            and all(is_equal(a, b) for a, b in self._inputs)
        )


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, NaN among them."""
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _copied(table: Any) -> Any:
    """What a dictionary, list or set holds: a subclass may have methods that fail or do something,
    which are not called."""
    if isinstance(table, dict):
        return dict(dict.items(table))
    return [*list.__iter__(table)] if isinstance(table, list) else {*set.__iter__(table)}


def _is_same(now: Any, then: Any) -> bool:
    """Whether a dictionary, list or set holds the very same objects; no method of it is called."""
    if isinstance(now, dict):
        is_as_long = dict.__len__(now) == len(then)
        return is_as_long and all(dict.get(now, key, MISSING) is v for key, v in then.items())
    if isinstance(now, set):
        return bool(set.__eq__(now, then))
    return list.__len__(now) == len(then) and all(map(is_, list.__iter__(now), then))
