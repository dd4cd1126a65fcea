"""`optimize` for training: bfloat16 weights beside their lower halves, and fused optimizer steps.

A parameter of a listed layer becomes the upper half of its float32 weight, in place, once an
optimizer of ours holds it; to all but layers it stays the float32 weight
(optim/split_parameter.py). What no such optimizer holds stays float32, and its layer computes in
bfloat16 as under autocast.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim.optimizer import Optimizer

from .. import optim
from ..core.interruption import pass_on_interruption
from ..core.watched import is_parameter
from ..graph.forward import OwnSignature
from ..optim import pending_splits, split_parameter
from ..optim.compiler import never_compiled_alone
from ..optim.optimizer import FusedOptimizer
from ..rewriting.changes import AttributeSet, Change, ChangeLog, log_of
from ..rewriting.driver import run_passes
from ..rewriting.refusals import check_dtype_keys, check_has_sizes
from ..rewriting.report import Report
from . import processes
from .passes.cast import asked, dtypes
from .training_modules import (
    TAKE_ANY,
    ApplyRefusal,
    Bfloat16Forward,
    ModelForward,
    OwnDtypeForward,
    ParametrizationForward,
    PartForward,
    Saving,
    is_layer,
)

_FUSED: dict[type, type[FusedOptimizer]] = {
    getattr(torch.optim, name): getattr(optim, name)
    for name in optim.__all__
    if hasattr(torch.optim, name) and isinstance(getattr(optim, name), type)
}
"""torch's class -> ours."""

_DEVICES = ("cpu", "cuda", "xpu")
"""Where there are fused steps."""

_FEATURES = 8
"""Columns below which a table stays float32: reference energies, biases of users and items."""

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Hooks that the user registered; copying an optimizer loses them."""


class TrainingLog(ChangeLog):
    """Of a model that is trained, which more optimizers may join; dtype: what was asked for."""

    def __init__(self, report: Report, dtype: Any) -> None:
        super().__init__(report)
        self.dtype = dtype


class _Split(Change):
    """Parameters are split as soon as optimizers of ours hold them; of a group, all together."""

    def __init__(self, groups: list[list[nn.Parameter]]) -> None:
        self.groups = groups
        for group in groups:
            pending_splits.wish(group)

    def undo(self, restored: dict[nn.Parameter, nn.Parameter]) -> None:
        for group in self.groups:
            pending_splits.withdraw(group)
            for parameter in group:
                split_parameter.join(parameter)


def optimize_for_training(
    model: nn.Module,
    optimizer: Optimizer,
    dtype: torch.dtype | Mapping[Any, torch.dtype] | None,
    inplace: bool,
) -> tuple[nn.Module, Optimizer]:
    """See `oxytorch.optimize`."""
    log = _check(model, optimizer, dtype, inplace)
    hooks = {name: {**getattr(optimizer, name)} for name in _STEP_HOOKS}
    if not inplace:
        model, optimizer = _copied(model, optimizer)
    prepare = _prepare_again
    if log is None:
        prepare = _prepare
        wanted = {} if dtype is None else dtypes(model, dtype)
        kinds = sorted({str(d).removeprefix("torch.") for d in wanted.values()})
        kind = "/".join(kinds) or "dtypes as they are"
        log = TrainingLog(Report(type(model).__name__, kind, ["training"]), dtype)
    context = _TrainingContext(model, optimizer, log)
    run_passes(context, [prepare, _fuse_optimizer])
    for name, found in hooks.items():
        getattr(context.optimizer, name).update(found)
    return model, context.optimizer


@dataclass
class _TrainingContext:
    """One call in progress; layers: those that begin to compute in bfloat16."""

    model: nn.Module
    optimizer: Optimizer
    log: TrainingLog
    layers: list[nn.Module] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        """Whether there is a fused step for the optimizer."""
        return type(self.optimizer) in _FUSED or isinstance(self.optimizer, FusedOptimizer)


def _prepare(context: _TrainingContext) -> None:
    """The pass that prepares a model for split weights."""
    model, log = context.model, context.log
    if context.is_known and log.dtype is not None:
        context.layers = _prepare_layers(model, dtypes(model, log.dtype), log)
        if context.layers:
            _watch_modules(model, log)


def _prepare_again(context: _TrainingContext) -> None:
    """The pass that prepares what was put into a model that is trained already."""
    _prepare_later(context.model)


def _fuse_optimizer(context: _TrainingContext) -> None:
    """The pass that makes the optimizer one of ours."""
    log, kind = context.log, type(context.optimizer)
    if not context.is_known:
        name = f"{kind.__module__}.{kind.__name__}"
        log.skipped("optimizer", "", f"{name} is not known: it and all weights are as before")
        return
    optimizer = context.optimizer = _fused(context.optimizer)
    _report_layers(context.model, context.layers, log)
    held = (own for group in optimizer.param_groups for own in group["params"])
    kept = " with split weights" if any(map(_is_split, held)) else ""
    log.applied("optimizer", "", f"{type(optimizer).__name__}, fused step{kept}")


def _check(model: nn.Module, optimizer: Any, dtype: Any, inplace: bool) -> TrainingLog | None:
    """Refuses what cannot be done; returns the log of a model that is trained already."""
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
    check_has_sizes("optimize", model)
    if isinstance(dtype, Mapping):
        check_dtype_keys(model, dtype)
    processes.check(model, dtype)
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ValueError(
            "optimize: expected an optimizer without a learning-rate scheduler, got one that has "
            "one; make the scheduler from the optimizer that optimize returns"
        )
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("optimize: expected optimizer to hold parameters of model, got none")
    log = log_of(model)
    if log is None:
        return None
    if not isinstance(log, TrainingLog):
        raise ValueError(
            "optimize: expected a model that is not optimized yet, got one that is optimized for "
            "inference; call oxytorch.undo(model) first"
        )
    if not inplace or dtype not in (None, log.dtype):
        raise ValueError(
            "optimize: expected inplace=True and the same dtype or None for one more optimizer of "
            f"a model that is trained already, got inplace={inplace} and dtype={dtype}; "
            "undo(model) starts over"
        )
    return log


def _copied(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Copies of both; the copied optimizer holds parameters of the copied model."""
    memo: dict[int, Any] = {}
    try:
        copied: tuple[nn.Module, Optimizer] = copy.deepcopy((model, optimizer), memo)
        if type(optimizer) not in _FUSED and not isinstance(optimizer, FusedOptimizer):
            # torch copies groups and states only: LBFGS has its parameters in a list of its own.
            lost = {k: v for k, v in vars(optimizer).items() if k not in vars(copied[1])}
            vars(copied[1]).update(copy.deepcopy(lost, memo))
    except Exception as error:
        pass_on_interruption(error)
        raise ValueError(
            f"optimize: {type(model).__name__} and its optimizer cannot be copied "
            f"({type(error).__name__}: {error}); pass inplace=True to change them themselves"
        ) from error
    return copied


def _prepare_layers(
    model: nn.Module, wanted: Mapping[nn.Module, torch.dtype], log: ChangeLog
) -> list[nn.Module]:
    """Prepares modules that are not prepared yet for split weights.

    Returns those of them that are to compute in bfloat16.
    """
    refused = _refusals(model, wanted)
    modules = [module for module in model.modules() if not _is_prepared(module)]
    layers = [m for m in modules if wanted.get(m) == torch.bfloat16 and m not in refused]
    for path, module in model.named_modules():
        if module in refused and module in modules:
            log.skipped("cast", path, refused[module])
    if not layers and not log.changes:
        return []
    log.changes.append(_Split(_tied_together(layers)))
    lists = [module for module in modules if isinstance(module, ParametrizationList)]
    # They run in float32, with what is in them.
    inner = {below for own in lists for below in own.modules()} - {*lists}
    kept = _named_float32(model, log)
    for module in modules:
        forward = None if module in inner else _forward(module, layers, module in kept)
        if forward is None and module is not model and _is_part(module, layers):
            forward = PartForward(module)
        if forward is not None:
            log.set_forward(module, forward)
        log.changes.append(AttributeSet(module, "_apply", ApplyRefusal(module)))
    return layers


def _named_float32(model: nn.Module, log: ChangeLog) -> set[nn.Module]:
    """The modules that a key of the dtypes asked for leaves in float32."""
    rules = log.dtype if isinstance(log, TrainingLog) and isinstance(log.dtype, Mapping) else {}
    named = model.named_modules()
    return {module for path, module in named if asked(path, module, rules) == torch.float32}


def _forward(module: nn.Module, layers: list[nn.Module], is_kept: bool) -> OwnSignature | None:
    """What the module's forward is to be, where it is not to stay.

    layers: those in bfloat16.
    is_kept: whether a key leaves the module in float32.
    """
    if isinstance(module, ParametrizationList) and module in layers:
        return ParametrizationForward(module)
    # A layer without a bias may have no parameters but those that its weight is made of.
    parts = module._modules.get("parametrizations")
    made_from = parts.values() if isinstance(parts, nn.ModuleDict) else ()
    if module in layers or any(part in layers for part in made_from):
        return Bfloat16Forward(module)
    if is_kept and not is_layer(module):
        return OwnDtypeForward(module)
    if _floats(module) and is_layer(module) and type(module) not in TAKE_ANY:
        # Amid others that return bfloat16 it is given its own dtype.
        return OwnDtypeForward(module)
    return None


def _is_part(module: nn.Module, layers: list[nn.Module]) -> bool:
    """Whether the module's own forward may call some of the layers."""
    if "forward" in module.__dict__ or type(module).forward is nn.Module.forward:
        return False
    return any(below in layers for below in module.modules())


def _watch_modules(model: nn.Module, log: ChangeLog) -> None:
    """Prepares the model itself: what is put into it later is found when it is called."""
    log.set_forward(model, ModelForward(model))
    if hasattr(type(model), "save_pretrained"):
        log.changes.append(AttributeSet(model, "save_pretrained", Saving(model)))
    for function in (processes.refuse_sharding, _prepare_when_called):
        log.add_hook(model, "_forward_pre_hooks", model.register_forward_pre_hook(function))


def _is_prepared(module: nn.Module) -> bool:
    return "_apply" in module.__dict__


@never_compiled_alone
def _prepare_when_called(model: nn.Module, inputs: Any) -> None:
    """Called before each forward of the model; a program that is compiled takes it as it is."""
    if not torch.compiler.is_compiling() and not all(map(_is_prepared, model.modules())):
        _prepare_later(model)


def _prepare_later(model: nn.Module) -> None:
    """Prepares modules that were put into a model that is trained already as those before."""
    log = log_of(model)
    if isinstance(log, TrainingLog) and log.changes:
        layers = _prepare_layers(model, dtypes(model, log.dtype), log)
        pending_splits.hold_still(own for module in layers for own in _floats(module))
        _report_layers(model, layers, log)


def _refusals(model: nn.Module, wanted: Mapping[nn.Module, torch.dtype]) -> dict[nn.Module, str]:
    """Why the parameters of modules that are to be bfloat16 are not split."""
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in _floats(module):
            holders.setdefault(parameter, []).append(module)
    chosen = {module for module, dtype in wanted.items() if dtype == torch.bfloat16}
    refused = {m: reason for m in chosen if (reason := _refusal(m)) is not None}
    while True:
        left = chosen - {*refused}
        shared = {m for m in left if any(h not in left for p in _floats(m) for h in holders[p])}
        if not shared:
            return refused
        refused |= dict.fromkeys(shared, "shares its weight with what stays as it is")


def _refusal(module: nn.Module) -> str | None:
    """Why the module's own parameters are not split, or None."""
    if getattr(module, "sparse", False):
        return "its gradients are sparse, and go torch's way"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.embedding_dim < _FEATURES:
        return f"rows of fewer than {_FEATURES} columns are numbers more often than features"
    for parameter in filterfalse(_is_split, _floats(module)):
        if not is_parameter(parameter) or parameter.device.type not in _DEVICES:
            return f"holds a {type(parameter).__name__} on {parameter.device}"
        if parameter.dtype != torch.float32:
            return f"its parameters are {str(parameter.dtype).removeprefix('torch.')} already"
    return None


def _tied_together(modules: Iterable[nn.Module]) -> list[list[nn.Parameter]]:
    """The modules' parameters, those of one module and of what shares any with it in one list."""
    found: list[dict[nn.Parameter, None]] = []
    for module in modules:
        own = dict.fromkeys(filterfalse(_is_split, _floats(module)))
        for other in [group for group in found if not own.keys().isdisjoint(group)]:
            found.remove(other)
            own = {**other, **own}
        found.append(own)
    return [[*group] for group in found]


def _floats(module: nn.Module) -> list[nn.Parameter]:
    """A module's own floating-point parameters."""
    own = module._parameters.values()
    return [p for p in own if p is not None and p.is_floating_point()]


def _is_split(parameter: Any) -> bool:
    return type(parameter) is split_parameter.SplitParameter


def _report_layers(model: nn.Module, layers: list[nn.Module], log: ChangeLog) -> None:
    for path, module in model.named_modules():
        if module in layers:
            kind = f"{type(module).__name__} to bfloat16"
            is_split = any(map(_is_split, _floats(module)))
            how = "split weights" if is_split else "float32 weights, which optimizer does not hold"
            log.applied("cast", path, f"{kind}, {how}")


def _fused(optimizer: Optimizer) -> FusedOptimizer:
    """The optimizer as our class, with its groups, states and hooks."""
    fused_class = _FUSED.get(type(optimizer))
    if fused_class is not None:
        return _rebuilt(optimizer, fused_class)
    assert isinstance(optimizer, FusedOptimizer)
    for group in optimizer.param_groups:
        pending_splits.hold(group["params"], optimizer)
    return optimizer


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
