"""The functions that layers of torch call."""

from __future__ import annotations

from torch import nn
from torch.nn import functional

_FUNCTIONS_OF: dict[type, tuple[tuple[str, str], ...]] = {}


def functions_of(kind: type[nn.Module]) -> tuple[tuple[str, str], ...]:
    """The functions of torch.nn.functional that a class of torch's layers, or one below it, calls:
    (module, name)."""
    kind = next(each for each in kind.__mro__ if each.__module__.startswith("torch.nn."))
    if kind in _FUNCTIONS_OF or kind is nn.Module:
        return _FUNCTIONS_OF.get(kind, ())
    codes = [getattr(found, "__code__", None) for found in vars(kind).values()]
    names = {name for code in codes if code is not None for name in code.co_names}
    found = sorted(name for name in names if callable(vars(functional).get(name)))
    _FUNCTIONS_OF[kind] = tuple((functional.__name__, name) for name in found)
    return _FUNCTIONS_OF[kind]
