"""Packages whose public names are imported when they are asked for."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from . import _garbage


class Package(ModuleType):
    """A package with `_LATER`: which of its submodules has each public name.

    A name that is its submodule's own stands for the submodule's member of that name where there
    is one (`oxytorch.optimize`, `oxytorch.ops.softmax`), and for the submodule otherwise
    (`oxytorch.llm`), whichever way the submodule is imported.
    """

    def __getattr__(self, name: str) -> Any:
        later: dict[str, str] = self.__dict__["_LATER"]
        if name not in later:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        with _garbage.paused():
            module = importlib.import_module(f"{self.__name__}.{later[name]}")
        if name != later[name]:
            setattr(self, name, getattr(module, name))
        # The import system has set a name that is the submodule's own.
        return self.__dict__[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and self.__dict__["_LATER"].get(name) == name:
            value = getattr(value, name, value)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__dict__["_LATER"]})
