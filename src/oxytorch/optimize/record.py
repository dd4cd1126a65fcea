"""The changes made to a model, each with the way back."""

from __future__ import annotations

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
        self.before = module.__dict__.get("forward")
        module.__dict__["forward"] = forward

    def undo(self, restored: dict[nn.Parameter, nn.Parameter]) -> None:
        del self.module.__dict__["forward"]
        if self.before is not None:
            self.module.__dict__["forward"] = self.before


class ParameterSet(Change):
    """A parameter was replaced by one of the same values (up to its new dtype)."""

    def __init__(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        before = module._parameters[name]
        assert before is not None
        self.module = module
        self.name = name
        self.dtype = before.dtype
        self.memory_format = _memory_format(before)
        setattr(module, name, parameter)

    def undo(self, restored: dict[nn.Parameter, nn.Parameter]) -> None:
        now = self.module._parameters[self.name]
        if now is None:
            return
        if now not in restored:
            values = now.dense() if isinstance(now, PackedTensor) else now.detach()
            memory_format = getattr(torch, self.memory_format)
            values = values.to(self.dtype).contiguous(memory_format=memory_format)
            restored[now] = nn.Parameter(values, now.requires_grad)
        setattr(self.module, self.name, restored[now])


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
