"""The functions that layers of torch call."""

from __future__ import annotations

import os
import types
from typing import Any

import torch
from torch import nn
from torch.nn import functional

TORCH = os.path.dirname(torch.__file__) + os.sep
"""The folder of torch's code in Python."""
_METHODS = ("forward", "_conv_forward")

_FUNCTIONS_OF: dict[type, tuple[tuple[str, str], ...]] = {}


def functions_of(kind: type[nn.Module]) -> tuple[tuple[str, str], ...]:
    """The functions of torch.nn.functional that a class of torch's layers, or one below it, calls:
    (module, name)."""
    kind = next(each for each in kind.__mro__ if each.__module__.startswith("torch.nn."))
    if kind in _FUNCTIONS_OF or kind is nn.Module:
        return _FUNCTIONS_OF.get(kind, ())
    members = [found for each in _torchs(kind) for found in vars(each).values()]
    codes = [getattr(found, "__code__", None) for found in members]
    names = {name for code in codes if code is not None for name in code.co_names}
    found = sorted(name for name in names if _is_function(vars(functional).get(name)))
    _FUNCTIONS_OF[kind] = tuple((functional.__name__, name) for name in found)
    return _FUNCTIONS_OF[kind]


def replaced_in(kind: type[nn.Module]) -> str | None:
    """The name of what somebody put in place of code of torch that a layer of this class runs.

    It is the forward of a class of torch's layers, or a function of torch.nn.functional.
    """
    torchs = _torchs(kind)
    for each in torchs:
        for name in _METHODS:
            if name in vars(each) and not _is_torchs(vars(each)[name]):
                return f"{each.__name__}.{name}"
    names = (name for _, name in functions_of(kind)) if torchs else ()
    return next((n for n in names if not _is_torchs(vars(functional)[n])), None)


def _torchs(kind: type[nn.Module]) -> list[type]:
    """The classes of torch's layers that a class is made of."""
    found = [each for each in kind.__mro__ if each.__module__.startswith("torch.nn.modules.")]
    return [each for each in found if each is not nn.Module]


def _is_function(found: Any) -> bool:
    return callable(found) and not isinstance(found, type)


def _is_torchs(function: Any) -> bool:
    if isinstance(function, types.FunctionType):
        return function.__code__.co_filename.startswith(TORCH)
    return isinstance(function, types.BuiltinFunctionType)
