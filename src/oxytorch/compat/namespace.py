"""Modules of the predecessor's names, made from the table of names."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NoReturn

from .errors import PAGE, not_served
from .names import NAMES, NAMESPACES, Name

API = "2.8.0"
"""The last release of the predecessor, whose names these are."""


class Elsewhere:
    """Stands for a function or class that is not served: any use of it says what to do."""

    def __init__(self, name: Name) -> None:
        self._name = name

    def _refuse(self) -> NoReturn:
        raise not_served(self._name.path, self._name.note)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        self._refuse()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        self._refuse()

    def __instancecheck__(self, value: object) -> bool:
        return False

    def __enter__(self) -> NoReturn:
        self._refuse()

    def __exit__(self, *error: object) -> None:
        return None

    def __repr__(self) -> str:
        return f"<{self._name.path}, not served: {self._name.note}>"


def resolve(name: Name) -> Any:
    """What a name stands for: a function or class, or what says where to go instead.

    Raises NotServedError for values that are not served.
    """
    if not name.home:
        if name.is_value:
            raise not_served(name.path, name.note)
        return Elsewhere(name)
    place, _, attribute = name.home.partition(":")
    value: Any = importlib.import_module(place)
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise not_served(name.path, f"this version of {place.split('.')[0]} has no {attribute}")
        value = getattr(value, part)
    return value


class Namespace(ModuleType):
    """A module of the predecessor's; `path` is its name below the package, "" for the package."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name, f"Names of the predecessor, served by oxytorch ({PAGE}).")
        self.__path__: list[str] = []
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return look_up(self.__name__, self._path, name, self.__dict__)

    def __dir__(self) -> list[str]:
        return names_below(self._path)


def look_up(module: str, path: str, name: str, kept: dict[str, Any]) -> Any:
    """The attribute `name` of the module of that path; kept: where served ones stay."""
    full = f"{path}.{name}" if path else name
    if full in NAMES:
        value = resolve(NAMES[full])
    elif full in NAMESPACES:
        value = importlib.import_module(f"{module}.{name}")
    elif full == "__version__":
        value = f"{API}+oxytorch"
    else:
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}; {PAGE} lists the names that are known"
        )
    kept[name] = value
    return value


def names_below(path: str) -> list[str]:
    """The names directly in the module of that path."""
    prefix = f"{path}." if path else ""
    found = {full[len(prefix) :] for full in (*NAMES, *NAMESPACES) if full.startswith(prefix)}
    return sorted({name.split(".")[0] for name in found if name})
