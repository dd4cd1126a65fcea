"""Which parameters become split: those for which it is wished, once optimizers hold them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from .split_parameter import split


class _Together:
    """Parameters that are split together, as soon as optimizers of ours hold them all."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [weakref.ref(own) for own in parameters]
        self._free = {id(own) for own in parameters}

    def hold(self, parameter: Tensor) -> None:
        self._free.discard(id(parameter))
        if not self._free:
            for own in (reference() for reference in self._parameters):
                if own is not None:
                    split(own)
                    _wishes.pop(own, None)


_wishes: Any = WeakIdKeyDictionary()
"""Plain parameters that are to be split once an optimizer holds them."""

_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers of ours. A weak reference to a parameter would keep it from being swapped."""


def wish(parameters: Sequence[nn.Parameter]) -> None:
    """Lets float32 parameters be split, all together, when optimizers of ours hold them all."""
    together = _Together(parameters)
    for parameter in parameters:
        _wishes[parameter] = together


def withdraw(parameters: Iterable[Tensor]) -> None:
    """Ends a wish."""
    for parameter in parameters:
        _wishes.pop(parameter, None)


def hold(parameters: Iterable[Tensor], optimizer: Optimizer) -> None:
    """Notes that an optimizer of oxytorch steps the parameters."""
    _optimizers.add(optimizer)
    for parameter in parameters:
        _fulfil(parameter)


def hold_still(parameters: Iterable[Tensor]) -> None:
    """Splits those that are wished for and that an optimizer of ours has held since before."""
    groups = (group["params"] for own in _optimizers for group in own.param_groups)
    held = {id(parameter) for group in groups for parameter in group}
    for parameter in parameters:
        if id(parameter) in held:
            _fulfil(parameter)


def _fulfil(parameter: Tensor) -> None:
    together = _wishes.get(parameter)
    if together is not None:
        together.hold(parameter)
