"""Parameters whose version counts writes through `.data` too, and which tensors are plain ones."""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn


class WatchedParameter(nn.Parameter):
    """A parameter whose version counts writes through `.data` too.

    Modes that ask for the very types of tensors, as torch's tracer for `make_fx`, do not take it.
    """

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """A plain parameter: only one that exists becomes watched (`watch`)."""
        return nn.Parameter(data, requires_grad)

    @property
    def data(self) -> Tensor:
        """The values, with the parameter's version."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        set_memory(self, value)

    def detach(self) -> Tensor:
        """As of a plain one: `nn.Parameter(p)` is a parameter over the same memory."""
        detached = super().detach()
        if asks(nn.Parameter.__new__, sys._getframe(1)):
            detached.__class__ = WatchedParameter
        return detached

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shown = super().detach().requires_grad_(self.requires_grad)
        return f"Parameter containing:\n{shown!r}"


WatchedParameter.__name__ = nn.Parameter.__name__  # as errors of torch name types

_PARAMETERS = (nn.Parameter, WatchedParameter)
PLAIN = (Tensor, *_PARAMETERS)
"""The types of tensors that are nothing but that: torch's operators do with them what they do."""


def is_parameter(value: Any) -> TypeGuard[nn.Parameter]:
    """Whether a value is a parameter of such a type."""
    return type(value) in _PARAMETERS


def watch(parameter: Tensor) -> bool:
    """Make writes through `.data` count as writes, if a parameter is a plain one; whether it was
    made so now."""
    if type(parameter) is not nn.Parameter:
        return False
    parameter.__class__ = WatchedParameter
    return True


def unwatch(parameter: Tensor) -> None:
    """Make a watched parameter a plain one again."""
    if type(parameter) is WatchedParameter:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def set_memory(parameter: Tensor, value: Tensor) -> None:
    """What assigning to `.data` of a plain tensor does, which subclasses hide."""
    memory: Any = torch._C.TensorBase.data
    with torch._C.DisableTorchFunctionSubclass():
        memory.__set__(parameter, value)


def asks(function: Any, frame: Any) -> bool:
    """Whether a frame is that of a function, or of a default device's mode that the function is
    called under."""
    while frame.f_globals.get("__name__") == "torch.utils._device":
        frame = frame.f_back
    return bool(frame.f_code is function.__code__)
