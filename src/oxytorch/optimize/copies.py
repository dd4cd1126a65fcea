"""A copy of a model that shares the original's tensors until they are changed."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn

_Model = TypeVar("_Model", bound=nn.Module)


def copied(model: _Model, caller: str = "optimize") -> _Model:
    """Copy a model's structure; parameters and buffers are shared with it for now."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ValueError(
            f"{caller}: model {type(model).__name__} cannot be copied "
            f"({type(error).__name__}: {error}); pass inplace=True to change it itself"
        ) from error


class Separation:
    """Gives a copy tensors of its own where it still shares the original's."""

    def __init__(self, original: nn.Module) -> None:
        self._theirs = {id(t) for t in (*original.parameters(), *original.buffers())}
        self._own: dict[int, Any] = {}

    def __call__(self, part: nn.Module) -> None:
        for module in part.modules():
            for name, parameter in [*module._parameters.items()]:
                if parameter is not None and id(parameter) in self._theirs:
                    if id(parameter) not in self._own:
                        self._own[id(parameter)] = nn.Parameter(
                            parameter.detach().clone(), parameter.requires_grad
                        )
                    setattr(module, name, self._own[id(parameter)])
            for name, buffer in [*module._buffers.items()]:
                if buffer is not None and id(buffer) in self._theirs:
                    module._buffers[name] = self._own.setdefault(id(buffer), buffer.clone())
