"""What a module computes: by its type where that says it, else by its formula.

A class written by a model's author (an RMS norm, a GELU spelled out, a linear layer with a
transposed weight) is recognized by the operators that it runs (see `formula`), and confirmed on
random values. Nothing depends on class names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..core.packed import PackedTensor
from ..ops.convolution import Geometry, needed_dilation
from ..ops.post_op import PostOp
from .activations import activation_of_module
from .agreement import RECOGNIZED
from .formula import expression, result_of


@dataclass(frozen=True)
class RecognizedNorm:
    """A normalization over the last dimension.

    kind: "layer_norm" or "rms_norm".
    offset: what is added to the weight (1 in Gemma).
    """

    kind: str
    eps: float
    offset: float = 0.0


def holds_its_parameters(module: nn.Module, names: Iterable[str] = ("weight", "bias")) -> bool:
    """Whether a module's parameters are where its class puts them.

    Code may have put plain tensors in their place, which only the module's own code finds.
    """
    return all(name in module._parameters for name in names)


def norm_of_module(module: nn.Module) -> RecognizedNorm | None:
    """Return the normalization over the last dimension that a module computes, or None."""
    kind = type(module)
    if kind is nn.LayerNorm and not holds_its_parameters(module):
        return None
    if kind is nn.RMSNorm and not holds_its_parameters(module, ["weight"]):
        return None
    if kind is nn.LayerNorm and len(module.normalized_shape) == 1:  # type: ignore[arg-type]
        return RecognizedNorm("layer_norm", float(module.eps))  # type: ignore[arg-type]
    if kind is nn.RMSNorm and len(module.normalized_shape) == 1:  # type: ignore[arg-type]
        given: Any = module.eps
        eps = torch.finfo(torch.float32).eps if given is None else float(given)
        return RecognizedNorm("rms_norm", eps)
    if kind.__module__.startswith("torch.nn") or [*module.children(), *module.buffers()]:
        return None
    weight = module._parameters.get("weight")
    names = [name for name, value in module._parameters.items() if value is not None]
    if weight is None or weight.dim() != 1 or names != ["weight"] or _hooked(module):
        return None
    if isinstance(weight, PackedTensor) or weight.device.type != "cpu":
        return None
    if weight.dtype not in RECOGNIZED:
        return None
    x = torch.randn(3, weight.shape[0], generator=torch.Generator().manual_seed(0), device="cpu")
    x[0] *= 1e-3  # small rows tell one epsilon from another
    # Of inputs with three dimensions too: there the last one is no other one's number.
    norm, in_three = (_norm_by_formula(module, given) for given in (x, x[None]))
    if norm != in_three:
        return None
    found = None if norm is None else result_of(module.forward, module, x.to(weight.dtype))
    if norm is None or found is None or found.shape != x.shape:
        return None
    size, factor = (weight.shape[0],), weight.detach().float() + norm.offset
    if norm.kind == "rms_norm":
        expected = F.rms_norm(x, size, factor, norm.eps)
    else:
        expected = F.layer_norm(x, size, factor, None, norm.eps)
    tolerance = RECOGNIZED[weight.dtype]
    same = torch.allclose(found.float(), expected, rtol=tolerance, atol=tolerance)
    return norm if same else None


def _norm_by_formula(module: nn.Module, x: torch.Tensor) -> RecognizedNorm | None:
    """The normalization that a module's operators are for this input, or None."""
    weight: Any = module._parameters["weight"]
    formula = expression(module.forward, x.to(weight.dtype), {"weight": weight}, module)
    known = (_norm_formulas(eps, x.dim()).get(formula) for eps in _added(formula))
    return None if formula is None else next((norm for norm in known if norm is not None), None)


def _norm_formulas(eps: float, dims: int) -> dict[Any, RecognizedNorm]:
    """The normalizations that we know with this epsilon, by the ways in which models spell them.

    dims: the dimensions of the input, of which the last one is normalized over.
    """
    weight, x = torch.ones(2, device="cpu"), torch.ones(*[1] * (dims - 1), 2, device="cpu")

    def scaled(x: torch.Tensor, dim: int) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + eps)

    def centered(x: torch.Tensor, dim: int) -> torch.Tensor:
        return x - x.mean(dim, keepdim=True)

    def by_variance(x: torch.Tensor, dim: int) -> torch.Tensor:
        return centered(x, dim) * torch.rsqrt(x.var(dim, unbiased=False, keepdim=True) + eps)

    spelled: list[tuple[RecognizedNorm, Callable[..., torch.Tensor]]] = [
        (RecognizedNorm("rms_norm", eps), lambda x, dim: weight * scaled(x, dim)),
        (RecognizedNorm("rms_norm", eps, 1.0), lambda x, dim: (1.0 + weight) * scaled(x, dim)),
        (RecognizedNorm("layer_norm", eps), lambda x, dim: weight * scaled(centered(x, dim), dim)),
        (RecognizedNorm("layer_norm", eps), lambda x, dim: weight * by_variance(x, dim)),
    ]
    return {
        expression(functools.partial(run, dim=dim), x, {"weight": weight}): norm
        for norm, run in spelled
        for dim in (-1, dims - 1)
    }


def _added(found: Any) -> list[float]:
    """The constants that an expression adds, and 0."""
    match found:
        case ("sum", float(constant), *parts):
            return [constant, *(c for part in parts for c in _added(part))]
        case (str(), *parts):
            return [0.0, *(c for part in parts for c in _added(part))]
    return [0.0]


@dataclass(frozen=True)
class LinearForm:
    """How a module stores the weight of a linear layer."""

    transposed: bool


BATCH_NORMS: dict[type, int] = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}
"""Torch's batch normalizations, with the dimensions that each goes over."""


@dataclass(frozen=True)
class BatchNorm:
    """A normalization with fixed statistics: (x - mean) / sqrt(variance + eps) * weight + bias.

    dims: the dimensions that it goes over, besides those of batch and channels.
    """

    dims: int
    mean: torch.Tensor
    variance: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float


def batch_norm_of_module(module: nn.Module) -> BatchNorm | None:
    """Return the normalization with fixed statistics that a module computes, or None.

    That is torch's in evaluation mode, or one of the model's own whose tensors are buffers (frozen
    batch normalization). Not where a weight is infinite: it would make NaN of products that are
    not.
    """
    buffers, parameters = module._buffers, module._parameters
    mean, variance = buffers.get("running_mean"), buffers.get("running_var")
    if mean is None or variance is None or module.training:
        return None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    if type(module) in BATCH_NORMS:
        if not holds_its_parameters(module):
            return None
        weight, bias = parameters["weight"], parameters["bias"]
        dims, eps = BATCH_NORMS[type(module)], float(module.eps)  # type: ignore[arg-type]
    else:
        weight, bias = buffers.get("weight"), buffers.get("bias")
        found = _frozen_epsilon(module)
        if found is None:
            return None
        dims, eps = 2, found
    if weight is not None and bool(weight.detach().isinf().any()):
        return None
    return BatchNorm(dims, mean, variance, weight, bias, eps)


_FROZEN = ("weight", "bias", "running_mean", "running_var")


def _frozen_epsilon(module: nn.Module) -> float | None:
    """The epsilon of a frozen batch normalization over images, by its formula; None for others."""
    if type(module).__module__.startswith("torch.nn") or [*module.children()] or _hooked(module):
        return None
    tensors = {name: module._buffers.get(name) for name in _FROZEN}
    variance = tensors["running_var"]
    if any(p is not None for p in module._parameters.values()) or variance is None:
        return None
    if any(
        t is None or t.shape != variance.shape or t.dtype != torch.float32 or t.device.type != "cpu"
        for t in tensors.values()
    ):
        return None
    own: Any = functools.partial(type(module).forward, module)  # not the one that a pass gave it
    x = torch.randn(
        2, len(variance), 3, 2, generator=torch.Generator().manual_seed(0), device="cpu"
    )
    named: dict[str, Any] = {**tensors}
    found = expression(own, x, named, module)
    eps = _added_to("running_var", found)
    if eps is None or variance.dim() != 1:
        return None
    weight, bias, mean, _ = (named[name] for name in _FROZEN)

    def first(x: torch.Tensor) -> Any:
        w, b, m, v = (named[name].reshape(1, -1, 1, 1) for name in _FROZEN)
        scale = w * (v + eps).rsqrt()
        return x * scale + (b - m * scale)

    def last(x: torch.Tensor) -> Any:
        scale = weight * (variance + eps).rsqrt()
        return x * scale.reshape(1, -1, 1, 1) + (bias - mean * scale).reshape(1, -1, 1, 1)

    with torch.no_grad():
        result = own(x) if found is not None else None
    if found not in [expression(way, x, named) for way in (first, last)] or result is None:
        return None
    expected = F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)
    tolerance = RECOGNIZED[x.dtype]
    same = torch.allclose(result, expected, rtol=tolerance, atol=tolerance)
    return eps if same else None


def _added_to(name: str, found: Any) -> float | None:
    """The constant that an expression adds to a tensor, or to a view of it."""
    match found:
        case ("sum", float(constant), added) if added == name or added[:2] == ("view", name):
            return constant
        case (_, *parts):
            return next((c for part in parts if (c := _added_to(name, part)) is not None), None)
    return None


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MAY_DEFINE = {"__init__", "__module__", "__doc__", "__qualname__", "__annotations__",
               "__parameters__", "__static_attributes__", "__firstlineno__", "reset_parameters",
               "extra_repr"}  # fmt: skip


def convolution_of_module(module: nn.Module) -> Geometry | None:
    """Return the geometry of a convolution with zeros around its input, or None for anything else.

    A class of the model's own is one that computes nothing itself, only sets its arguments.
    """
    base = next((kind for kind in type(module).__mro__ if kind in _CONVOLUTIONS), None)
    if base is None or not holds_its_parameters(module):
        return None
    own = type(module).__mro__[: type(module).__mro__.index(base)]
    if any({*vars(kind)} - _MAY_DEFINE for kind in own) or "_conv_forward" in module.__dict__:
        return None
    layer: Any = module
    padding = layer.padding
    if padding == "valid":
        padding = (0,) * len(layer.kernel_size)
    elif padding == "same":
        sums = [
            step * (length - 1)
            for step, length in zip(layer.dilation, layer.kernel_size, strict=True)
        ]
        if any(total % 2 for total in sums):
            return None
        padding = tuple(total // 2 for total in sums)
    if layer.padding_mode != "zeros" or type(padding) is not tuple:
        return None
    dilation = tuple(needed_dilation(layer.dilation, layer.kernel_size, 1))
    return Geometry(layer.stride, padding, dilation, layer.groups)


def linear_of_module(module: nn.Module) -> LinearForm | None:
    """Return how a linear layer stores its weight, or None for anything else."""
    if type(module) is nn.Linear:
        return LinearForm(False) if holds_its_parameters(module) else None
    if type(module).__module__.startswith("torch.nn") or [*module.children(), *module.buffers()]:
        return None
    weight = module._parameters.get("weight")
    bias = module._parameters.get("bias")
    names = {name for name, value in module._parameters.items() if value is not None}
    if weight is None or weight.dim() != 2 or names - {"weight", "bias"} or _hooked(module):
        return None
    if weight.dtype not in RECOGNIZED or weight.device.type != "cpu":
        return None
    if isinstance(weight, PackedTensor):
        return None
    tolerance = RECOGNIZED[weight.dtype]
    for transposed in (True, False):
        seeded = torch.Generator().manual_seed(0)
        x = torch.randn(2, weight.shape[0 if transposed else 1], generator=seeded, device="cpu").to(
            weight.dtype
        )
        tensors = {name: module._parameters[name] for name in names}
        if expression(module.forward, x, tensors, module) not in _linear_formulas(transposed):  # type: ignore[arg-type]
            continue
        values = weight.detach().t() if transposed else weight.detach()
        # In three dimensions the operators may be others, which reshape; the result is the same.
        for given in (x, torch.stack([x, -x, x])):
            found = result_of(module.forward, module, given)
            expected = F.linear(given, values, bias)
            if found is None or found.shape != expected.shape:
                return None
            if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
                return None
        return LinearForm(transposed)
    return None


@functools.cache
def _linear_formulas(transposed: bool) -> list[Any]:
    """The expressions of a linear layer, as models spell it."""
    weight, bias, x = (
        torch.zeros(2, 2, device="cpu"),
        torch.zeros(2, device="cpu"),
        torch.zeros(2, 2, device="cpu"),
    )
    spelled: list[Callable[[torch.Tensor], torch.Tensor]]
    if transposed:
        spelled = [
            lambda x: F.linear(x, weight.t()),
            lambda x: x @ weight,
            lambda x: x @ weight + bias,
            lambda x: torch.addmm(bias, x, weight),
        ]
    else:
        spelled = [
            lambda x: F.linear(x, weight),
            lambda x: F.linear(x, weight, bias),
            lambda x: x @ weight.t(),
            lambda x: x @ weight.t() + bias,
            lambda x: torch.addmm(bias, x, weight.t()),
        ]
    tensors = {"weight": weight, "bias": bias}
    return [e for run in spelled if (e := expression(run, x, tensors)) is not None]


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


class Recognizer:
    """Remembers what each module was recognized as."""

    def __init__(self) -> None:
        self._found: dict[nn.Module, dict[str, Any]] = {}

    def activation(self, module: nn.Module) -> PostOp | None:
        found: PostOp | None = self._once("activation", activation_of_module, module)
        return found

    def norm(self, module: nn.Module) -> RecognizedNorm | None:
        """Return the normalization that `optimize` computes with the module's own weight."""
        found: RecognizedNorm | None = self._once("norm", norm_of_module, module)
        return None if found is None or found.offset else found

    def batch_norm(self, module: nn.Module) -> BatchNorm | None:
        found: BatchNorm | None = self._once("batch_norm", batch_norm_of_module, module)
        return found

    def linear(self, module: nn.Module) -> LinearForm | None:
        found: LinearForm | None = self._once("linear", linear_of_module, module)
        return found

    def _once(self, what: str, recognize: Callable[[nn.Module], Any], module: nn.Module) -> Any:
        found = self._found.setdefault(module, {})
        if what not in found:
            found[what] = recognize(module)
        return found[what]

    def keeps_whole(self, module: nn.Module) -> bool:
        """Whether a graph should call this module instead of looking inside it."""
        kinds = (
            convolution_of_module(module),
            self.linear(module),
            self.norm(module),
            self.batch_norm(module),
            self.activation(module),
        )
        return any(kind is not None for kind in kinds)
