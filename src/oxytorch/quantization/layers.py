"""Which modules of a model are linear layers that `quantize_` takes, and their new forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ..core.modes import must_run_plain
from ..core.packed import PackedTensor, why_not_plain
from ..graph.forward import Forward, with_parameters
from ..graph.recognize import Recognizer
from ..ops.linear_panels import linear_panels
from ..ops.panels import PanelWeight
from ..ops.panels.product import in_255_steps
from ..optimize.context import CLOSED
from ..rewriting.changes import ChangeLog, ParameterSet, Untied
from ..rewriting.refusals import names_in
from .configs import WeightConfig
from .other_layers import OtherLayer, other_layer
from .weights import ReorderedPanelWeight, activation_dtype

Filter = Callable[[str, nn.Module], bool] | str | Iterable[str] | None


@dataclass(frozen=True)
class Layer:
    """A linear layer that can be quantized.

    owners: all modules that hold this weight as a linear layer, itself first.
    beside: paths of other modules that hold it too (an embedding tied to the output head): it stays
        plain for them.
    holder: one of these, as (module, name of its parameter).
    """

    path: str
    module: nn.Module
    transposed: bool
    owners: tuple[nn.Module, ...]
    beside: tuple[str, ...]
    holder: tuple[nn.Module, str] | None

    @property
    def weight(self) -> nn.Parameter:
        weight = self.module._parameters["weight"]
        assert weight is not None
        return weight

    @property
    def name(self) -> str:
        """The path, or what the model is where it is the layer itself."""
        return self.path or f"the {type(self.module).__name__}"

    @property
    def weight_name(self) -> str:
        """The path of the weight."""
        return f"{self.path}.weight" if self.path else "weight"

    @property
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features]."""
        first, second = self.weight.shape
        return (second, first) if self.transposed else (first, second)


@dataclass(frozen=True)
class Left:
    """A module that stays as it is, and why."""

    path: str
    module: nn.Module
    reason: str

    @property
    def is_packed(self) -> bool:
        """Whether one of its weights is packed, in which case there is nothing to quantize."""
        return any(isinstance(p, PackedTensor) for p in self.module._parameters.values())


def find(
    caller: str, model: nn.Module, filter: Filter, config: WeightConfig
) -> tuple[list[Layer], list[OtherLayer], list[Left]]:
    """Return the linear layers to quantize, the other ones, and the modules with weights that are
    left.

    filter: see `quantize_`. Raises ValueError for a pattern that no module matches.
    """
    recognizer = Recognizer()
    paths = {module: path for path, module in model.named_modules()}
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in paths:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((module, name))
    closed = {part for m in paths if isinstance(m, CLOSED) for part in m.modules()}
    chosen = _chooser(caller, model, paths, filter)
    layers: list[Layer] = []
    others: list[OtherLayer] = []
    left: list[Left] = []
    taken: set[nn.Module] = set()
    for module, path in paths.items():
        if module in taken or not _has_matrix(module):
            continue
        other = other_layer(path, module, config, holders) if module not in closed else None
        if other is not None:
            why = other if isinstance(other, str) else chosen(path, module)
            if isinstance(other, OtherLayer) and why is None:
                others.append(other)
            else:
                left.append(Left(path, module, str(why)))
            continue
        reason = _refusal(module, recognizer, module in closed) or chosen(path, module)
        if reason is not None:
            left.append(Left(path, module, reason))
            continue
        weight = module._parameters["weight"]
        form = recognizer.linear(module)
        assert weight is not None and form is not None
        own = [m for m, name in holders[id(weight)] if name == "weight" and m not in closed]
        owners = [m for m in own if recognizer.linear(m) == form]
        sharers = [own for own in holders[id(weight)] if own[0] not in owners]
        beside, holder = tuple(paths[m] for m, _ in sharers), next(iter(sharers), None)
        taken.update(owners)
        layers.append(Layer(path, module, form.transposed, tuple(owners), beside, holder))
    return layers, others, left


def _has_matrix(module: nn.Module) -> bool:
    return any(p is not None and p.dim() > 1 for p in module._parameters.values())


def _refusal(module: nn.Module, recognizer: Recognizer, is_closed: bool) -> str | None:
    """Why a module cannot be quantized, or None if it can."""
    weight = module._parameters.get("weight")
    if isinstance(weight, PackedTensor):
        form = f"{weight.format} already" if isinstance(weight, PanelWeight) else "packed already"
        return form
    if is_closed:
        return "its parent reads its weights itself"
    if recognizer.linear(module) is None:
        if isinstance(module, nn.Linear):
            return f"the forward of {type(module).__name__} is not that of torch.nn.Linear"
        return f"{type(module).__name__} is no linear layer"
    reason = why_not_plain(weight)
    if reason is not None:
        return reason
    assert weight is not None
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    return None


def output_head(model: nn.Module) -> nn.Module | None:
    """The layer that gives a language model's scores, as transformers names it, or None."""
    getter = getattr(model, "get_output_embeddings", None)
    found = getter() if callable(getter) else None
    return found if isinstance(found, nn.Module) else None


def _chooser(
    caller: str, model: nn.Module, paths: dict[nn.Module, str], filter: Filter
) -> Callable[[str, nn.Module], str | None]:
    """Return what gives the reason why the filter leaves a module, or None where it takes it."""
    if filter is None:
        head = output_head(model)
        reason = "output head; a filter that names it takes it too"
        return lambda path, module: reason if module is head else None
    if callable(filter):
        takes = filter
        return lambda path, module: None if takes(path, module) else "left out by the filter"
    patterns = [filter] if isinstance(filter, str) else names_in(caller, "filter", filter)
    for pattern in patterns:
        if not any(_matches(path, pattern) for path in paths.values()):
            raise ValueError(
                f"{caller}: expected filter to name modules of the model, got {pattern!r}, which "
                "matches none; names are those of model.named_modules(), with * for any part"
            )
    return lambda path, module: (
        None if any(_matches(path, p) for p in patterns) else "left out by the filter"
    )


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")


class RoundingForward(Forward):
    """A linear layer's own forward on plain values, which does with inputs what the kernel does.

    It takes them in any of float32, bfloat16 and float16, and returns their dtype.
    """

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, of an input in 255 steps a row where the weight says so."""
        weight = self.module._parameters.get("weight")
        if not isinstance(weight, PackedTensor) or not _is_single(args, kwargs):
            return super().own(*args, **kwargs)
        (x,) = (*args, *kwargs.values())
        own = x
        if activation_dtype(weight) == "int8":
            own = in_255_steps(x.float()).to(x.dtype)
        converts = weight.dtype in _DTYPES and not torch.is_autocast_enabled("cpu")
        if converts:
            own = own.to(weight.dtype)
        found = super().own(*[own for _ in args], **dict.fromkeys(kwargs, own))
        return found.to(x.dtype) if converts else found

    def _home(self) -> nn.Module:
        """The module with a bias of the dtype of the weight, where only the bias was converted."""
        parameters = self.module._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if not isinstance(weight, PackedTensor) or bias is None or bias.dtype == weight.dtype:
            return self.module
        if weight.dtype not in _DTYPES or torch.is_autocast_enabled("cpu"):
            return self.module
        made: nn.Module = with_parameters(
            self.module, {**parameters, "bias": bias.to(weight.dtype)}
        )
        return made


def _is_single(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call has one argument, which a kernel would take."""
    if len(args) + len(kwargs) != 1:
        return False
    (x,) = (*args, *kwargs.values())
    if not isinstance(x, Tensor) or x.dtype not in _DTYPES or x.is_nested:
        return False
    return x.layout == torch.strided and x.dim() > 0 and x.shape[-1] > 0


class PanelForward(RoundingForward):
    """The forward of a linear layer whose weight is packed in panels."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._product(args[0]) if len(args) == 1 and not kwargs else None
        return self.own(*args, **kwargs) if found is None else found

    def _product(self, x: Any) -> Tensor | None:
        weight: Any = self.module._parameters.get("weight")
        bias = self._bias()
        packed = weight.packed if isinstance(weight, ReorderedPanelWeight) else weight
        if not isinstance(packed, PanelWeight) or bias is False or type(x) is not Tensor:
            return None
        if must_run_plain(x, weight, bias) or not weight.is_packed():
            return None
        if x.dtype not in _DTYPES or x.layout != torch.strided or x.is_nested:
            return None  # the module's own code says what is wrong with it
        if x.dim() == 0 or x.shape[-1] != packed.inputs:
            return None
        if bias is not None and bias.dtype not in (x.dtype, torch.float32):
            return None
        if isinstance(weight, ReorderedPanelWeight) and weight.order is not None:
            x = x[..., weight.order]
        rounded = packed.activation_dtype or "none"
        return linear_panels(x, *packed.operands, bias, None, "none", rounded)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def install(log: ChangeLog, layer: Layer, packed: PanelWeight) -> None:
    """Put a packed weight into a layer and all that share it.

    The state dictionary keeps its keys, with plain values.
    """
    stored = ReorderedPanelWeight.around(packed, layer.transposed, None)
    parameter = stored.as_parameter(layer.weight.requires_grad)
    owners = [(owner, "weight") for owner in layer.owners]
    if layer.holder is None:
        log.changes.append(ParameterSet(layer.module, "weight", parameter, owners=owners))
    else:
        log.changes += [Untied(*owner, parameter, layer.holder) for owner in owners]
    for owner, _ in owners:
        _serve(log, owner)


def install_at(
    log: ChangeLog, module: nn.Module, weight: PackedTensor, requires_grad: bool, is_shared: bool
) -> None:
    """Put a packed weight into one linear layer, which may have one already; is_shared: see
    `ParameterSet`."""
    parameter = weight.as_parameter(requires_grad)
    log.changes.append(ParameterSet(module, "weight", parameter, is_shared=is_shared))
    if not isinstance(module.__dict__.get("forward"), PanelForward):
        _serve(log, module)


def _serve(log: ChangeLog, module: nn.Module) -> None:
    """Give a module whose weight is packed its forward and a plain state dictionary."""
    log.prepare_for_packed(module)
    log.set_forward(module, PanelForward(module))
