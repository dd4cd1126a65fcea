"""The mapping `optimizer.state`, which counts how often an entry was replaced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Changes:
    """How often a state of an optimizer was replaced."""

    def __init__(self) -> None:
        self.count = 0


class ParameterState(dict[str, Any]):
    """The states of a parameter; changes: what counts, once it stands in a table."""

    changes: Changes | None = None

    def __reduce__(self) -> Any:
        # Copies stand in no table yet.
        return (ParameterState, (), None, None, iter(self.items()))

    def _note(self) -> None:
        if self.changes is not None:
            self.changes.count += 1

    def __setitem__(self, key: str, value: Any) -> None:
        self._note()
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._note()
        super().__delitem__(key)

    def __ior__(self, other: Any) -> ParameterState:  # type: ignore[override, misc]
        self.update(other)
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._note()
        super().update(*args, **kwargs)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self._note()
        return super().setdefault(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            self._note()
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        self._note()
        return super().popitem()

    def clear(self) -> None:
        self._note()
        super().clear()


class StateTable(defaultdict[Tensor, Any]):
    """`optimizer.state` as torch has it, of entries whose changes are counted.

    is_counted: False once it was given an entry of another type, or one of another table, whose
    changes nobody notices.
    """

    def __init__(
        self, factory: Any = ParameterState, entries: Mapping[Tensor, Any] | None = None
    ) -> None:
        super().__init__(factory)
        self.changes = Changes()
        self.is_counted = True
        for parameter, entry in (entries or {}).items():
            self[parameter] = (
                ParameterState(entry) if type(entry) in (dict, ParameterState) else entry
            )

    def __setitem__(self, parameter: Tensor, entry: Any) -> None:
        self.changes.count += 1
        if type(entry) is ParameterState and entry.changes in (None, self.changes):
            entry.changes = self.changes
        else:
            self.is_counted = False
        super().__setitem__(parameter, entry)

    def __delitem__(self, parameter: Tensor) -> None:
        self.changes.count += 1
        super().__delitem__(parameter)

    def __ior__(self, other: Any) -> StateTable:  # type: ignore[override, misc]
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
        self.changes.count += 1
        return super().pop(*args)

    def popitem(self) -> tuple[Tensor, Any]:
        self.changes.count += 1
        return super().popitem()

    def clear(self) -> None:
        self.changes.count += 1
        super().clear()


def counted(state: Any) -> StateTable:
    """`state` as a table whose changes are counted."""
    return state if type(state) is StateTable else StateTable(entries=state)


def change_count(state: object) -> int | None:
    """How often states were replaced; None where nobody counts."""
    return state.changes.count if type(state) is StateTable and state.is_counted else None
