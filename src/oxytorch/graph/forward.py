"""What stands in a module's instance dictionary in place of its own forward."""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch import Tensor, nn


class Forward:
    """Stands in for a module's own forward where it may; else that runs, on plain values.

    module: the one in whose instance dictionary it lies. converts: whether the module's weights
    were given another dtype, so that floating inputs are converted to it.
    """

    def __init__(self, module: nn.Module, converts: bool = False) -> None:
        self.module = module
        self.converts = converts

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        module = self.module
        if torch.jit.is_tracing():
            expose_weights(module)
        if self.converts and not torch.is_autocast_enabled("cpu"):
            dtype = next(p.dtype for p in module.parameters())
            args = tuple(_converted(a, dtype) for a in args)
            kwargs = {name: _converted(value, dtype) for name, value in kwargs.items()}
        return type(module).forward(module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not say how to compute")

    @property
    def __wrapped__(self) -> Any:
        """The module's own method, for who asks for the signature."""
        return types.MethodType(type(self.module).forward, self.module)

    @property
    def __code__(self) -> Any:
        return inspect.unwrap(self.__wrapped__).__code__

    @property
    def __name__(self) -> str:
        return "forward"


def _converted(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return tuple(_converted(v, dtype) for v in value) if type(value) is tuple else value


def expose_weights(module: nn.Module) -> None:
    """Give packed weights of a module the memory of their plain values: a trace keeps them."""
    for parameter in module._parameters.values():
        if parameter is not None and hasattr(parameter, "expose"):
            parameter.expose()
