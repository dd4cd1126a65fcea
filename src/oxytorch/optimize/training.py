"""`optimize` for training: bfloat16 weights beside their lower halves, and fused optimizer steps.

A parameter of a listed layer becomes the upper half of its float32 weight, in place, so that who
holds the parameter keeps it. The optimizer updates both halves together; state dictionaries show
the float32 weight.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from .. import optim
from ..optim import _sharding, formats
from ..optim._base import FusedOptimizer
from ..optim._states import IN_MODEL
from . import processes
from .passes.cast import CastInput, dtypes
from .record import ATTRIBUTE, Change, ForwardSet, HookAdded, Record
from .report import Entry, Report

_FUSED: dict[type, type[FusedOptimizer]] = {
    getattr(torch.optim, name): getattr(optim, name)
    for name in optim.__all__
    if hasattr(torch.optim, name) and isinstance(getattr(optim, name), type)
}
"""torch's class -> ours."""

_DEVICES = ("cpu", "cuda", "xpu")
"""Where there are fused steps."""

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Hooks that the user registered; copying an optimizer loses them."""


class Masters:
    """The lower halves of a model's split parameters.

    The optimizer holds the same tensors, as the state `low_half`, for the parameters that it
    updates.
    """

    def __init__(self) -> None:
        self._low: dict[Tensor, Tensor] = {}

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._low

    def split(self, parameter: nn.Parameter) -> None:
        """Make a float32 parameter the upper half of its weight and keep the lower one."""
        upper, low = formats.split(parameter)
        parameter.data = upper
        self._low[parameter] = low

    def join(self, parameter: nn.Parameter) -> None:
        """Make a split parameter float32 again."""
        if parameter in self._low:
            weight = self.weight(parameter)
            del self._low[parameter]
            parameter.data = weight

    def weight(self, parameter: Tensor) -> Tensor:
        """The exact float32 weight, a new tensor."""
        return formats.join(parameter, self._low[parameter])

    @torch.no_grad()
    def set(self, parameter: Tensor, weight: Tensor) -> None:
        """Give a split parameter the float32 value `weight`, all bits of it."""
        upper, low = formats.split(weight.detach().float())
        parameter.copy_(upper)
        self._low[parameter].copy_(low)

    def follow(self, model: nn.Module, record: Record) -> None:
        """Keep the halves together when DDP wraps the model."""
        if self._low:
            hook = model.register_forward_pre_hook(processes.BeforeForward(self._low))
            record.changes.append(HookAdded(model, "_forward_pre_hooks", hook.id))

    def hand_over(self, optimizer: FusedOptimizer) -> None:
        """Let the optimizer update the halves that are kept here."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._low:
                    optimizer.set_low_half(parameter, self._low[parameter])


class _Split(Change):
    """A parameter was split."""

    def __init__(self, masters: Masters, parameter: nn.Parameter) -> None:
        self.masters = masters
        self.parameter = parameter
        masters.split(parameter)

    def undo(self, restored: dict[nn.Parameter, nn.Parameter]) -> None:
        self.masters.join(self.parameter)


class _ShowPlain:
    """Shows a module's split parameters as float32 in its state dictionary."""

    def __init__(self, masters: Masters) -> None:
        self.masters = masters

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
    ) -> None:
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if _sharding.is_sharded(parameter):
                raise RuntimeError(
                    f"optimize: fully_shard was called after optimize and replaced {prefix}{name}, "
                    f"whose lower half is left behind; {processes.ORDER}"
                )
            if parameter in self.masters and prefix + name in state:
                state[prefix + name] = self.masters.weight(parameter)


class _TakePlain:
    """Takes float32 weights for a module's split parameters from a state dictionary."""

    def __init__(self, masters: Masters) -> None:
        self.masters = masters

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, parameter in module._parameters.items():
            given = state.get(prefix + name)
            if parameter is None or parameter not in self.masters or not isinstance(given, Tensor):
                continue
            if given.shape == parameter.shape:
                self.masters.set(parameter, given)
                state[prefix + name] = parameter.detach().clone()


def optimize_for_training(
    model: nn.Module,
    optimizer: Optimizer,
    dtype: torch.dtype | Mapping[Any, torch.dtype] | None,
    inplace: bool,
) -> tuple[nn.Module, Optimizer]:
    """See `oxytorch.optimize`."""
    _check(model, optimizer, dtype)
    began = time.perf_counter()
    hooks = {name: {**getattr(optimizer, name)} for name in _STEP_HOOKS}
    if not inplace:
        model, optimizer = _copied(model, optimizer)
    wanted = {} if dtype is None else dtypes(model, dtype)
    kinds = sorted({str(d).removeprefix("torch.") for d in wanted.values()})
    report = Report(type(model).__name__, "/".join(kinds) or "dtypes as they are", ["training"])
    report.bytes_before = _nbytes(model)
    record = Record(report)
    fused_class = _FUSED.get(type(optimizer))
    if fused_class is None and not isinstance(optimizer, FusedOptimizer):
        name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        report.entries.append(
            Entry("optimizer", "", False, f"{name} is not known: it and all weights are as before")
        )
    else:
        masters = Masters()
        _split_weights(model, optimizer, wanted, record, masters)
        masters.follow(model, record)
        optimizer = _fused(optimizer, fused_class, masters)
        for name, found in hooks.items():
            getattr(optimizer, name).update(found)
        kept = " with split weights" if len(record.changes) else ""
        report.entries.append(
            Entry("optimizer", "", True, f"{type(optimizer).__name__}, fused step{kept}")
        )
    model.__dict__[ATTRIBUTE] = record
    report.bytes_after = _nbytes(model)
    report.seconds = time.perf_counter() - began
    return model, optimizer


def _check(model: nn.Module, optimizer: Any, dtype: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "optimize: expected optimizer to be a torch.optim.Optimizer, "
            f"got a {type(optimizer).__name__}"
        )
    given = [*dtype.values()] if isinstance(dtype, Mapping) else [dtype]
    if any(value not in (None, torch.bfloat16, torch.float32) for value in given):
        raise ValueError(
            f"optimize: expected dtype torch.bfloat16, torch.float32 or None for training, "
            f"got {dtype}; for float16 use torch.autocast and torch.amp.GradScaler"
        )
    processes.check(model, dtype)
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ValueError(
            "optimize: expected an optimizer without a learning-rate scheduler, got one that has "
            "one; make the scheduler from the optimizer that optimize returns"
        )
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("optimize: expected optimizer to hold parameters of model, got none")


def _copied(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    try:
        copied: tuple[nn.Module, Optimizer] = copy.deepcopy((model, optimizer))
    except Exception as error:
        raise ValueError(
            f"optimize: {type(model).__name__} and its optimizer cannot be copied "
            f"({type(error).__name__}: {error}); pass inplace=True to change them themselves"
        ) from error
    return copied


def _split_weights(
    model: nn.Module,
    optimizer: Optimizer,
    wanted: Mapping[nn.Module, torch.dtype],
    record: Record,
    masters: Masters,
) -> None:
    """Split the float32 parameters of the modules that are to be bfloat16."""
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(parameter, []).append(module)
    show, take = _ShowPlain(masters), _TakePlain(masters)
    is_mixed = torch.bfloat16 in wanted.values()
    for path, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None and p.is_floating_point()]
        if not own:
            continue
        reason = _refusal(own, holders, wanted, masters) if module in wanted else "keeps its dtype"
        if reason is None:
            for parameter in own:
                if parameter not in masters:
                    record.changes.append(_Split(masters, parameter))
            state = module.register_state_dict_post_hook(show)
            record.changes.append(HookAdded(module, "_state_dict_hooks", state.id))
            load = module.register_load_state_dict_pre_hook(take)
            record.changes.append(HookAdded(module, "_load_state_dict_pre_hooks", load.id))
            record.report.entries.append(
                Entry("cast", path, True, f"{type(module).__name__} to bfloat16, split weights")
            )
        elif module in wanted and wanted[module] == torch.bfloat16:
            record.report.entries.append(Entry("cast", path, False, reason))
        _convert_inputs(
            module, torch.bfloat16 if reason is None else own[0].dtype, is_mixed, record
        )


def _refusal(
    parameters: list[nn.Parameter],
    holders: Mapping[nn.Parameter, list[nn.Module]],
    wanted: Mapping[nn.Module, torch.dtype],
    masters: Masters,
) -> str | None:
    """Why a module's parameters are not split, or None."""
    for parameter in parameters:
        if type(parameter) is not nn.Parameter or parameter.device.type not in _DEVICES:
            return f"holds a {type(parameter).__name__} on {parameter.device}"
        if parameter.dtype != torch.float32 and parameter not in masters:
            return f"its parameters are {str(parameter.dtype).removeprefix('torch.')} already"
        if any(wanted.get(holder) != torch.bfloat16 for holder in holders[parameter]):
            return "is not to be bfloat16, or shares its weight with what is not"
    return None


_TAKE_ANY = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
)
"""Layers that take inputs of another dtype than their parameters'."""


def _convert_inputs(module: nn.Module, own: torch.dtype, is_mixed: bool, record: Record) -> None:
    """Give a layer of torch inputs of its own dtype where others flow around it."""
    is_layer = type(module).__module__.startswith("torch.nn") and not [*module.children()]
    if is_mixed and is_layer and type(module) not in _TAKE_ANY:
        record.changes.append(ForwardSet(module, CastInput(module)))


def _fused(
    optimizer: Optimizer, fused_class: type[FusedOptimizer] | None, masters: Masters
) -> FusedOptimizer:
    """The optimizer as our class, with its groups, states and hooks."""
    fused = optimizer if fused_class is None else _rebuilt(optimizer, fused_class)
    assert isinstance(fused, FusedOptimizer)
    for group in fused.param_groups:
        if any(parameter in masters for parameter in group["params"]):
            group["master_weights"] = IN_MODEL
    masters.hand_over(fused)
    return fused


def _rebuilt(optimizer: Optimizer, fused_class: type[FusedOptimizer]) -> FusedOptimizer:
    known = inspect.signature(type(optimizer).__init__).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    groups = [{**group, "params": [*group["params"]]} for group in optimizer.param_groups]
    fused = fused_class(groups, **defaults)
    for group, before in zip(fused.param_groups, optimizer.param_groups, strict=True):
        group.update({name: value for name, value in before.items() if name != "params"})
    for parameter, state in optimizer.state.items():
        fused.state[parameter].update(state)
    return fused


def _nbytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters() if p.device.type != "meta")
