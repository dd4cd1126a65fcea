"""A copy of a model that shares the memory of the original's parameters until it changes them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from ..core.gradients import give_gradient_of
from ..core.interruption import pass_on_interruption
from ..core.own_storage import is_aliased
from ..core.packed import PackedTensor
from ..core.watched import is_parameter

_Model = TypeVar("_Model", bound=nn.Module)
_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr)


def copied(model: _Model, caller: str = "optimize") -> _Model:
    """Copy a model; its parameters become other objects over the same memory for now.

    As in any deep copy there is one object for each parameter, wherever the model holds it: in a
    list, in an object, in an optimizer.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if _can_share(parameter):
            # Tensors of inference mode do not count the writes to them.
            values = parameter.clone() if parameter.is_inference() else parameter.data
            other = nn.Parameter(values, parameter.requires_grad)
            if parameter.grad is not None:
                give_gradient_of(other, parameter, copy.deepcopy(parameter.grad, memo))
            memo[id(parameter)] = other
    for module in model.modules():
        for value in module.__dict__.values():
            # What a hook computed from weights (`torch.nn.utils.weight_norm`) has no deep copy.
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        pass_on_interruption(error)
        raise ValueError(
            f"{caller}: model {type(model).__name__} cannot be copied "
            f"({type(error).__name__}: {error}); pass inplace=True to change it itself"
        ) from error


def same_weights(model: _Model) -> _Model:
    """Copy the modules of a model; the copies hold the very parameters and buffers.

    What replaces these while it looks at the copy, as `torch.export` does, is not seen by others
    who call the model. Returns the model itself if it has no deep copy.
    """
    kept = [*model.parameters(), *model.buffers()]
    values = (value for module in model.modules() for value in module.__dict__.values())
    kept += [value for value in values if isinstance(value, torch.Tensor)]
    try:
        return copy.deepcopy(model, {id(tensor): tensor for tensor in kept})
    except Exception as error:
        pass_on_interruption(error)
        return model


class Separation:
    """Gives a copy memory of its own where it still shares the original's.

    aliased: see `InPlace`; a copy's memory is its own.
    """

    aliased: frozenset[int] = frozenset()

    def __init__(self, original: nn.Module) -> None:
        self._theirs = {_memory(p) for p in original.parameters() if _can_share(p)}

    def __call__(self, part: nn.Module) -> None:
        for parameter in part.parameters():
            if isinstance(parameter, PackedTensor):
                plain = parameter.cell.plain
                if plain is not None and _memory(plain) in self._theirs:
                    parameter.cell.plain = plain.clone()
            elif _can_share(parameter) and _memory(parameter) in self._theirs:
                parameter.data = parameter.detach().clone()


class InPlace:
    """Stands in for `Separation` where a model itself is changed, or a copy that may go on sharing
    memory (None).

    aliased: the identities of its parameters whose memory other tensors hold too (views of one
        vector, weights that are tied by their memory), through which it may be written to unseen.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.aliased = frozenset[int]() if model is None else aliased_among(model.parameters())
        if model is not None and self.aliased:  # copies that are gone wait for a collection
            gc.collect()
            self.aliased = aliased_among(model.parameters())

    def __call__(self, part: nn.Module) -> None:
        """Leave a part of the model as it is."""


def _can_share(parameter: nn.Parameter) -> bool:
    return is_parameter(parameter) and parameter.layout in _LAYOUTS


def aliased_among(parameters: Iterable[nn.Parameter]) -> frozenset[int]:
    """The identities of those parameters whose memory other tensors hold too."""
    shared = (p for p in parameters if _can_share(p) and p.layout == torch.strided)
    return frozenset(id(p) for p in shared if is_aliased(p))


def _memory(parameter: torch.Tensor) -> int:
    values = parameter
    if parameter.layout == torch.sparse_coo:
        values = parameter.detach()._values()
    elif parameter.layout == torch.sparse_csr:
        values = parameter.detach().values()
    return int(values.untyped_storage()._cdata)
