"""Puts weights from a file into a model: all of them, or none if something does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import CheckpointError
from ..core.packed import PackedTensor
from ..rewriting.changes import QUANTIZED, ChangeLog, log_of
from ..rewriting.memory import nbytes
from ..rewriting.refusals import check_finite
from .byte_weights import ByteWeight
from .layers import install_at
from .other_layers import install_other
from .quantization_report import QuantizationReport, QuantizedLayer
from .weights import ReorderedPanelWeight


@dataclass
class Filling:
    """What is to be put into a model, by name; nothing is changed before `put`.

    shared: names of parameters that are the same as another.
    """

    model: nn.Module
    source: str
    packed: dict[str, PackedTensor] = field(default_factory=dict)
    plain: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)

    def check_complete(self, unused: Iterable[str]) -> None:
        """Raise CheckpointError unless every parameter has a value and no tensor is left over."""
        wanted = dict(_slots(self.model))
        given = {*self.packed, *self.plain, *self.shared}
        groups: dict[int, list[str]] = {}
        for name, tensor in wanted.items():
            groups.setdefault(id(tensor), []).append(name)
        for names in groups.values():
            filled = [name for name in names if name in given]
            for name in names:
                if name not in given and filled:
                    self.shared[name] = filled[0]
        given |= {*self.shared}
        missing = [name for name in wanted if name not in given]
        if missing:
            raise CheckpointError(
                f"{self.source}: expected a tensor for each of the model's parameters, found none "
                f"for {_some(missing)}"
            )
        extra = [name for name in [*given, *unused] if name not in wanted]
        if extra:
            raise CheckpointError(
                f"{self.source}: expected tensors of the model only, got {_some(extra)}, which "
                f"{type(self.model).__name__} does not have"
            )

    def check_finite(self) -> None:
        """Raise CheckpointError that names a plain tensor which is not finite."""
        for name, tensor in self.plain.items():
            if tensor.is_floating_point():
                check_finite(self.source, f"tensor {name!r}", tensor, CheckpointError)

    def put(self, config: str) -> None:
        """Put everything into the model; config: how it is quantized, for the report."""
        report = QuantizationReport(type(self.model).__name__, config, ["load_quantized"])
        log = log_of(self.model, QUANTIZED) or ChangeLog(report)
        log.report = report
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        holders = Counter(map(id, parameters.values()))
        for name, tensor in self.plain.items():
            module, last = _owner(self.model, name)
            if name in parameters:
                needed = parameters[name].requires_grad and tensor.is_floating_point()
                module._parameters[last] = nn.Parameter(tensor, needed)
            else:
                module._buffers[last] = tensor
        for name, weight in self.packed.items():
            module, last = _owner(self.model, name)
            is_shared = holders[id(parameters[name])] > 1
            install_packed(log, module, last, weight, parameters[name].requires_grad, is_shared)
            path = name.rpartition(".")[0] if last == "weight" else name
            shape = (weight.shape[0], weight.shape[1])
            before = weight.numel() * weight.dtype.itemsize
            layer = QuantizedLayer(path, shape, before, weight.nbytes_packed())
            report.add(layer, _format(weight), ())
        for name, first in self.shared.items():
            self._share(log, name, first)
        report.bytes_after = report.bytes_before = nbytes(self.model)
        report.bytes_before += sum(x.bytes_before - x.bytes_after for x in report.layers)
        self.model.__dict__[QUANTIZED] = log

    def _share(self, log: ChangeLog, name: str, first: str) -> None:
        module, last = _owner(self.model, name)
        source, source_last = _owner(self.model, first)
        value = source._parameters.get(source_last)
        if isinstance(value, PackedTensor):
            install_packed(log, module, last, value, value.requires_grad, is_shared=True)
        elif source_last in source._parameters:
            module._parameters[last] = value
        else:
            module._buffers[last] = source._buffers[source_last]


def _slots(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Parameters and the buffers that state dictionaries hold, by every name they have."""
    yield from model.named_parameters(remove_duplicate=False)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{path}.{name}" if path else name), buffer


def slots(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a state dictionary of the model holds, by name."""
    return dict(_slots(model))


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A plain tensor in a dtype, if it is floating; over the file's memory if it has it already."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def check_slot(source: str, name: str, given: Tensor, wanted: dict[str, Tensor]) -> None:
    """Raise CheckpointError unless the shape is that of the model's tensor of this name."""
    if name in wanted and wanted[name].shape != given.shape:
        raise CheckpointError(
            f"{source}: expected tensor {name!r} of shape {list(wanted[name].shape)}, got "
            f"{list(given.shape)}"
        )


def install_packed(
    log: ChangeLog,
    module: nn.Module,
    name: str,
    weight: PackedTensor,
    requires_grad: bool,
    is_shared: bool,
) -> None:
    """Put a packed weight of any kind into a module; is_shared: see `ParameterSet`."""
    if isinstance(weight, ByteWeight):
        install_other(log, module, name, weight, requires_grad, is_shared)
    else:
        install_at(log, module, weight, requires_grad, is_shared)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def _format(weight: PackedTensor) -> str:
    inner: Any = weight.packed if isinstance(weight, ReorderedPanelWeight) else weight
    return str(inner.format)


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
