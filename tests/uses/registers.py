"""Decorators that put functions into tables, under their names without underscores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_F = TypeVar("_F", bound=Callable[..., object])


def into(table: dict[str, _F]) -> Callable[[_F], _F]:
    """A decorator that registers a function in `table`."""

    def register(function: _F) -> _F:
        table[function.__name__.strip("_")] = function
        return function

    return register


def into_of(table: dict[str, tuple[str, _F]]) -> Callable[..., Callable[[_F], _F]]:
    """A decorator with names: it registers a function in `table` once for each, beside the name."""

    def of(*names: str) -> Callable[[_F], _F]:
        def register(function: _F) -> _F:
            for name in names:
                table[f"{function.__name__.strip('_')}-{name}"] = name, function
            return function

        return register

    return of
