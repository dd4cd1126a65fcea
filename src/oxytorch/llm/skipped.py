"""The code of modules whose calls a record skips: classes' methods, and the functions they call."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn import functional

from ..core.sources import MISSING, Places

_CALLS = ("forward", "__call__", "_call_impl")


class SkippedCode:
    """The code that modules' own calls would run, as it is now.

    That are the methods of their classes which a call gets to, the functions of the classes' Python
    modules and of torch.nn.functional which these name, and the attention function that the
    configuration of transformers chooses. All are compared by identity.
    before: what was found for modules that these are a copy of, and counts for them too, or None.
    """

    def __init__(self, modules: Iterable[nn.Module], before: Found | None = None) -> None:
        self.found = found = Found()
        for module in modules:
            code = _code_of(type(module))
            for kind, name in code.methods:
                found.attributes[id(kind), name] = (kind, name, getattr(kind, name))
            for table, name in (*code.names, *_chosen(module, code.interfaces)):
                found.entries[id(table), name] = (table, name, table.get(name, MISSING))
        if before is not None:
            found.attributes.update(before.attributes)
            found.entries.update(before.entries)
        self._places = Places()
        self._places.attributes = [*found.attributes.values()]
        self._places.entries = [*found.entries.values()]
        self._places.close()

    def is_current(self) -> bool:
        """Whether none of it was replaced."""
        return self._places.are_current()


class Found:
    """What stood in classes and tables of variables. Copies share it; in a file it is empty.

    attributes, entries: (where, name, what), by the first two.
    """

    def __init__(self) -> None:
        self.attributes: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self.entries: dict[tuple[int, str], tuple[dict[Any, Any], str, Any]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Found:
        return self

    def __reduce__(self) -> Any:
        return Found, ()


@dataclass
class _Code:
    """The places where code was found: (class, name), (global variables, name).

    forward: the class's when it was looked at.
    interfaces: mappings that choose a function.
    """

    forward: Any
    methods: list[tuple[type, str]] = field(default_factory=list)
    names: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    interfaces: list[Any] = field(default_factory=list)


_KNOWN: dict[type, _Code] = {}


def methods_of(kind: type[nn.Module]) -> tuple[str, ...]:
    """Names of the methods that a call gets to, which an attribute of a module may hide."""
    return tuple(name for _, name in _code_of(kind).methods if name not in ("forward", "__call__"))


def _code_of(kind: type[nn.Module]) -> _Code:
    known = _KNOWN.get(kind)
    if known is None or known.forward is not kind.forward:
        _KNOWN[kind] = known = _Code(kind.forward)
        _Walk(kind, known)
    return known


class _Walk:
    """Looks for all code that a class's forward names."""

    def __init__(self, kind: type[nn.Module], found: _Code) -> None:
        self.kind = kind
        self.found = found
        self._owners = kind.__mro__[: kind.__mro__.index(nn.Module)]
        self._seen: set[Any] = set()
        for name in _CALLS:
            self._method(name)

    def _method(self, name: str) -> None:
        if (self.kind, name) in self.found.methods:
            return
        value = getattr(self.kind, name)
        is_property = isinstance(value, property)
        if not is_property and not isinstance(value, types.FunctionType):
            return
        self.found.methods.append((self.kind, name))
        self._function(value.fget if is_property else value)

    def _function(self, function: Any) -> None:
        """What a function names, and the functions that it wraps."""
        while isinstance(function, types.FunctionType) and function not in self._seen:
            self._seen.add(function)
            if function.__module__ == nn.Module.__module__:
                return
            for name in _names(function.__code__):
                self._name(function, name)
            function = getattr(function, "__wrapped__", None)

    def _name(self, function: types.FunctionType, name: str) -> None:
        table = function.__globals__
        if any(name in vars(owner) for owner in self._owners):
            self._method(name)
        if callable(vars(functional).get(name)):
            self.found.names.append((vars(functional), name))
        value = table.get(name)
        if hasattr(value, "_global_mapping"):
            self.found.interfaces.append(value)
        elif callable(value):
            self.found.names.append((table, name))
            if getattr(value, "__module__", None) == function.__module__:
                self._function(value)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _chosen(module: nn.Module, interfaces: list[Any]) -> Iterator[tuple[dict[Any, Any], str]]:
    """Where a module's configuration and the mappings say which function it calls."""
    settings = getattr(module.__dict__.get("config"), "__dict__", {})
    for setting in [name for name in settings if name.endswith("_implementation_internal")]:
        yield settings, setting
        for interface in interfaces:
            for table in (interface.__dict__.get("_local_mapping"), interface._global_mapping):
                if isinstance(table, dict) and isinstance(settings[setting], str):
                    yield table, settings[setting]
                    function = table.get(settings[setting])
                    for name in _names(getattr(function, "__code__", _NOTHING)):
                        if callable(vars(functional).get(name)):
                            yield vars(functional), name


_NOTHING = compile("", "", "exec")
