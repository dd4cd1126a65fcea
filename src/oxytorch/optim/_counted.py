"""The mapping `optimizer.state`, which tells when an entry was replaced."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_numbers = itertools.count(1)


class Changes:
    """How often any state of any optimizer was replaced; the number itself means nothing."""

    count = 0


def _note() -> None:
    Changes.count = next(_numbers)


class Entry(dict[str, Any]):
    """The states of a parameter."""

    def __setitem__(self, key: str, value: Any) -> None:
        _note()
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        _note()
        super().__delitem__(key)

    def __ior__(self, other: Any) -> Entry:  # type: ignore[override, misc]
        self.update(other)
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        _note()
        super().update(*args, **kwargs)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            _note()
        return super().setdefault(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            _note()
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        _note()
        return super().popitem()

    def clear(self) -> None:
        _note()
        super().clear()


class Table(defaultdict[Tensor, Any]):
    """`optimizer.state` as torch has it, of entries whose changes are counted.

    is_counted: False once it was given an entry of another type, whose changes nobody notices.
    """

    def __init__(self, factory: Any = Entry, entries: Mapping[Tensor, Any] | None = None) -> None:
        super().__init__(factory)
        self.is_counted = True
        for parameter, entry in (entries or {}).items():
            self[parameter] = Entry(entry) if type(entry) is dict else entry

    def __setitem__(self, parameter: Tensor, entry: Any) -> None:
        _note()
        if type(entry) is not Entry:
            self.is_counted = False
        super().__setitem__(parameter, entry)

    def __delitem__(self, parameter: Tensor) -> None:
        _note()
        super().__delitem__(parameter)

    def __ior__(self, other: Any) -> Table:  # type: ignore[override, misc]
        self.update(other)
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        for parameter, entry in dict(*args, **kwargs).items():
            self[parameter] = entry

    def setdefault(self, parameter: Tensor, entry: Any = None) -> Any:
        if parameter not in self:
            self[parameter] = entry
        return self[parameter]

    def pop(self, *args: Any) -> Any:
        _note()
        return super().pop(*args)

    def popitem(self) -> tuple[Tensor, Any]:
        _note()
        return super().popitem()

    def clear(self) -> None:
        _note()
        super().clear()
