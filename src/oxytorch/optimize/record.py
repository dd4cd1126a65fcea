"""The changes made to a model, each with the way back."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.packed import PackedTensor
from .report import Report

ATTRIBUTE = "_oxytorch"
QUANTIZED = "_oxytorch_quantized"
"""The same for what `quantize_` did, which comes before optimizing and is taken back after it."""


class Change:
    """One change to one module."""

    def undo(self, restored: dict[nn.Parameter, nn.Parameter]) -> None:
        """Take the change back. restored: what each parameter has become (shared ones stay so)."""
        raise NotImplementedError


class ForwardSet(Change):
    """A module got a forward of ours in its instance dictionary."""

    def __init__(self, module: nn.Module, forward: Any) -> None:
        self.module = module
        self.forward = forward
        self.before = module.__dict__.get("forward")
        module.__dict__["forward"] = forward

    def undo(self, restored: dict[nn.Parameter, nn.Parameter]) -> None:
        if self.module.__dict__.get("forward") is not self.forward:
            return  # somebody has put another one there since
        del self.module.__dict__["forward"]
        if self.before is not None:
            self.module.__dict__["forward"] = self.before


class ParameterSet(Change):
    """A parameter was replaced, in all modules that hold it, by one of the same values (up to its
    new dtype).

    owners: (module, name) of each, the one given by default. keeps_object: whether the parameter's
    object stays the same, so that an optimizer that holds it goes on holding the model's parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        parameter: nn.Parameter,
        *,
        owners: list[tuple[nn.Module, str]] | None = None,
        keeps_object: bool = False,
    ) -> None:
        before = module._parameters[name]
        assert before is not None
        self.module = module
        self.name = name
        self.owners = owners or [(module, name)]
        self.keeps_object = keeps_object
        self.dtype = before.dtype
        self.memory_format = _memory_format(before)
        _replace(self.owners, before, parameter, keeps_object)

    def undo(self, restored: dict[nn.Parameter, nn.Parameter]) -> None:
        now = self.module._parameters.get(self.name)
        if now is None:
            return
        holders = [own for own in self.owners if own[0]._parameters.get(own[1]) is now]
        if self.keeps_object or now not in restored:
            values = now.values() if isinstance(now, PackedTensor) else now.detach()
            memory_format = getattr(torch, self.memory_format)
            values = values.to(self.dtype)
            if values.layout == torch.strided:
                values = values.contiguous(memory_format=memory_format)
            restored[now] = nn.Parameter(values, now.requires_grad)
        _replace(holders, now, restored[now], self.keeps_object)


def _replace(
    owners: list[tuple[nn.Module, str]],
    before: nn.Parameter,
    parameter: nn.Parameter,
    keeps_object: bool,
) -> None:
    recurrent = [module for module, _ in owners if isinstance(module, nn.RNNBase)]
    for layer in recurrent:
        layer._flat_weight_refs = []  # a weak reference keeps a tensor from being swapped
    if not (keeps_object and _swapped(before, parameter)):
        for module, name in owners:
            setattr(module, name, parameter)
    for layer in recurrent:
        refs: list[Any] = [partial(_itself, w) for w in layer._flat_weights]
        layer._flat_weight_refs = refs


def _itself(tensor: Any) -> Any:
    return tensor


def _swapped(object_: nn.Parameter, other: nn.Parameter) -> bool:
    """Make an object another parameter, which keeps its gradient; False where it cannot be done."""
    if object_ is other:
        return True
    gradient = object_.grad
    if type(object_) is type(other) is nn.Parameter:
        object_.grad = None
        object_.data = other.data  # also where an autograd graph or a weak reference holds it
        object_.grad = None if gradient is None else gradient.to(object_.dtype)
        return True
    torch.clear_autocast_cache()  # it refers weakly to parameters
    kind, fields = type(object_), object_.__dict__
    try:
        torch.utils.swap_tensors(object_, other)  # type: ignore[no-untyped-call]
    except RuntimeError:  # held by an autograd graph or a weak reference
        if type(object_) is not kind:  # torch swaps these before it asks whether the rest can be
            object_.__class__, other.__class__ = kind, type(object_)
            object_.__dict__, other.__dict__ = fields, object_.__dict__
        return False
    if gradient is not None:
        object_.grad = gradient.to(object_.dtype)
    return True


class BufferSet(Change):
    """A buffer, which stays the same object, was given values in another dtype."""

    def __init__(self, module: nn.Module, name: str, buffer: torch.Tensor) -> None:
        self.module = module
        self.name = name
        own = module._buffers[name]
        assert own is not None
        self.own = own
        self.before = own.data
        own.data = buffer

    def undo(self, restored: dict[nn.Parameter, nn.Parameter]) -> None:
        now, before = self.own.data, self.before
        ours, theirs = (_dense(t) for t in (now, before.to(now.dtype)))
        was_written = not torch.allclose(ours, theirs, 0, 0, equal_nan=True)
        self.own.data = now.to(before.dtype) if was_written else before


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


class HookAdded(Change):
    """A hook of ours was registered on a module; `registry` names the dictionary that holds it."""

    def __init__(self, module: nn.Module, registry: str, key: int) -> None:
        self.module = module
        self.registry = registry
        self.key = key

    def undo(self, restored: dict[nn.Parameter, nn.Parameter]) -> None:
        getattr(self.module, self.registry).pop(self.key, None)


def _memory_format(tensor: torch.Tensor) -> str:
    """The name of a tensor's memory format (the format itself cannot be pickled)."""
    for dim, name in ((4, "channels_last"), (5, "channels_last_3d")):
        if tensor.layout != torch.strided:
            break
        plain = tensor.dim() != dim or tensor.is_contiguous()
        if not plain and tensor.is_contiguous(memory_format=getattr(torch, name)):
            return name
    return "contiguous_format"


class Record:
    """Kept on an optimized model: the report and the changes."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.changes: list[Change] = []

    def undo(self) -> None:
        restored: dict[nn.Parameter, nn.Parameter] = {}
        for change in reversed(self.changes):
            change.undo(restored)
        self.changes.clear()


def record_of(model: nn.Module, attribute: str = ATTRIBUTE) -> Record | None:
    """Return the record on a model, or None where `optimize` has not been here.

    attribute: QUANTIZED asks for the record of `quantize_`.
    """
    found = model.__dict__.get(attribute)
    return found if isinstance(found, Record) else None
