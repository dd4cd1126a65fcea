"""One name of the predecessor's, and how lists of them are written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Name:
    """One public name.

    path: below the package.
    home: "module:attribute" of what serves it; "" for none.
    note: what is different in what is served, or what to do in place of what is not.
    is_value: it is no function or class, so that asking for it is its use.
    """

    path: str
    home: str = ""
    note: str = ""
    is_value: bool = False


def served(prefix: str, names: str, place: str, note: str = "") -> tuple[Name, ...]:
    """Names of the module `prefix` that `place` serves: "name", or "name=attribute" there."""
    found = []
    for word in names.split():
        name, _, attribute = word.partition("=")
        path = f"{prefix}.{name}" if prefix else name
        found.append(Name(path, f"{place}:{attribute or name}", note))
    return tuple(found)


def elsewhere(prefix: str, names: str, way: str, is_value: bool = False) -> tuple[Name, ...]:
    """Names of the module `prefix` that are not served; way: what to do in their place."""
    paths = (f"{prefix}.{name}" if prefix else name for name in names.split())
    return tuple(Name(path, "", way, is_value) for path in paths)
