"""Which global variables and modules code names, as its instructions tell."""

from __future__ import annotations

import dis
import functools
import importlib.util
import types
from collections.abc import Iterator
from typing import Any

_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")
_NAMES_GLOBALS = (
    "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL",
    "STORE_NAME", "DELETE_NAME",
)  # fmt: skip


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> frozenset[str]:
    """The global variables that code names."""
    instructions = (i for i in dis.get_instructions(code) if i.opname in _NAMES_GLOBALS)
    return frozenset(i.argval for i in instructions)


def imported_names(code: types.CodeType, table: dict[str, Any]) -> Iterator[str]:
    """The full names of the modules that code can import; table: its global variables."""
    for name, level in _imports(code):
        if level:
            package = table.get("__package__") or str(table.get("__name__")).rpartition(".")[0]
            yield importlib.util.resolve_name("." * level + name, package)
        else:
            yield name


@functools.lru_cache(maxsize=4096)
def _imports(code: types.CodeType) -> tuple[tuple[str, int], ...]:
    """The modules that code can import: their names, and how many packages up these begin."""
    found, constants = [], [0, None]
    for each in dis.get_instructions(code):
        if each.opname == "IMPORT_NAME":
            level = constants[-2]
            found.append((each.argval, level if isinstance(level, int) else 0))
        elif each.opname in _CONSTANTS:
            constants.append(each.argval)
    return tuple(found)
