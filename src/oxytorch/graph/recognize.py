"""What a module computes: by its type where that says it, else by trying it on numbers.

A class written by a model's author (an RMS norm, a GELU spelled out, a linear layer with a
transposed weight) is recognized by its parameters' shapes and confirmed numerically: the module and
the formula run on the same random values. Nothing depends on class names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..ops._post_op import PostOp

_POST_OPS = (
    PostOp("relu"),
    PostOp("gelu", (), "none"),
    PostOp("gelu", (), "tanh"),
    PostOp("swish"),
    PostOp("sigmoid"),
    PostOp("tanh"),
    PostOp("hardswish"),
    PostOp("hardsigmoid"),
    PostOp("hardtanh", (0.0, 6.0)),
    PostOp("hardtanh", (-1.0, 1.0)),
)


@dataclass(frozen=True)
class Norm:
    """A normalization over the last dimension: kind is "layer_norm" or "rms_norm"."""

    kind: str
    eps: float


def activation_of_module(module: nn.Module) -> PostOp | None:
    """Return the post-operation that an activation module computes, or None."""
    kind = type(module)
    if kind is nn.ReLU:
        return PostOp("relu")
    if kind is nn.ReLU6:
        return PostOp("hardtanh", (0.0, 6.0))
    if kind is nn.GELU:
        return PostOp("gelu", (), module.approximate)  # type: ignore[arg-type]
    if kind is nn.LeakyReLU:
        return PostOp("leaky_relu", (float(module.negative_slope),))  # type: ignore[arg-type]
    if kind is nn.Hardtanh:
        return PostOp("hardtanh", (float(module.min_val), float(module.max_val)))  # type: ignore[arg-type]
    simple = {
        nn.SiLU: "swish",
        nn.Sigmoid: "sigmoid",
        nn.Tanh: "tanh",
        nn.Hardswish: "hardswish",
        nn.Hardsigmoid: "hardsigmoid",
    }
    if kind in simple:
        return PostOp(simple[kind])
    if kind.__module__.startswith("torch.nn") or not _stateless(module):
        return None
    return _same_on_numbers(module)


def _stateless(module: nn.Module) -> bool:
    state = (*module.parameters(), *module.buffers(), *module._forward_hooks.values())
    return not state and not module._forward_pre_hooks and type(module) is not nn.Module


def _same_on_numbers(module: nn.Module) -> PostOp | None:
    values = torch.linspace(-8, 8, 101).reshape(1, 101)
    found = _try(module, values.clone())
    if found is None or found.shape != values.shape:
        return None
    for post_op in _POST_OPS:
        if torch.allclose(found, post_op.after(values), rtol=1e-6, atol=1e-6):
            return post_op
    return None


def activation_of_function(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> PostOp | None:
    """Return the post-operation of a function or tensor-method call, or None."""
    name = target if isinstance(target, str) else _FUNCTIONS.get(target)
    if name is None:
        return None
    rest = [*args[1:]]
    name = name.rstrip("_") if isinstance(target, str) else name
    if name == "gelu":
        return PostOp("gelu", (), str(kwargs.get("approximate", rest[0] if rest else "none")))
    if name == "leaky_relu":
        return PostOp("leaky_relu", (float(kwargs.get("negative_slope", (rest or [0.01])[0])),))
    if name == "relu6":
        return PostOp("hardtanh", (0.0, 6.0))
    if name in ("clamp", "hardtanh"):
        low, high = ("min", "max") if name == "clamp" else ("min_val", "max_val")
        default = [None, None] if name == "clamp" else [-1.0, 1.0]
        given = [*rest[:2], *default[len(rest[:2]) :]]
        bounds = (kwargs.get(low, given[0]), kwargs.get(high, given[1]))
        if not all(isinstance(b, (int, float)) and math.isfinite(b) for b in bounds):
            return None
        return PostOp("hardtanh", (float(bounds[0]), float(bounds[1])))
    if name in ("relu", "sigmoid", "tanh", "silu", "hardswish", "hardsigmoid"):
        return PostOp("swish" if name == "silu" else name)
    return None


_FUNCTIONS: dict[Any, str] = {
    F.relu: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    F.gelu: "gelu",
    F.silu: "silu",
    F.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    F.tanh: "tanh",
    torch.tanh: "tanh",
    F.hardswish: "hardswish",
    F.hardsigmoid: "hardsigmoid",
    F.leaky_relu: "leaky_relu",
    F.relu6: "relu6",
    F.hardtanh: "hardtanh",
    torch.clamp: "clamp",
}


def norm_of_module(module: nn.Module) -> Norm | None:
    """Return the normalization over the last dimension that a module computes, or None."""
    kind = type(module)
    if kind is nn.LayerNorm and len(module.normalized_shape) == 1:  # type: ignore[arg-type]
        return Norm("layer_norm", float(module.eps))  # type: ignore[arg-type]
    if kind is nn.RMSNorm and len(module.normalized_shape) == 1:  # type: ignore[arg-type]
        return Norm("rms_norm", float(module.eps or torch.finfo(torch.float32).eps))  # type: ignore[arg-type]
    if kind.__module__.startswith("torch.nn") or [*module.children(), *module.buffers()]:
        return None
    weight = module._parameters.get("weight")
    names = [name for name, value in module._parameters.items() if value is not None]
    if weight is None or weight.dim() != 1 or names != ["weight"] or _hooked(module):
        return None
    epsilons = [v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1e-2]
    x = torch.randn(3, weight.shape[0], generator=torch.Generator().manual_seed(0))
    x[0] *= 1e-3  # small rows tell one epsilon from another
    found = _try(module, x.to(weight.dtype))
    if found is None or found.shape != x.shape:
        return None
    for eps in epsilons:
        expected = F.rms_norm(x, (weight.shape[0],), weight.detach().float(), eps)
        tolerance = 1e-5 if weight.dtype == torch.float32 else 2e-2
        if torch.allclose(found.float(), expected, rtol=tolerance, atol=tolerance):
            return Norm("rms_norm", eps)
    return None


@dataclass(frozen=True)
class LinearForm:
    """How a module stores the weight of a linear layer."""

    transposed: bool


def linear_of_module(module: nn.Module) -> LinearForm | None:
    """Return how a linear layer stores its weight, or None for anything else."""
    if type(module) is nn.Linear:
        return LinearForm(False)
    if type(module).__module__.startswith("torch.nn") or [*module.children(), *module.buffers()]:
        return None
    weight = module._parameters.get("weight")
    bias = module._parameters.get("bias")
    names = {name for name, value in module._parameters.items() if value is not None}
    if weight is None or weight.dim() != 2 or names - {"weight", "bias"} or _hooked(module):
        return None
    if weight.dtype not in _LINEAR_TOLERANCE or weight.device.type != "cpu":
        return None
    tolerance = _LINEAR_TOLERANCE[weight.dtype]
    for transposed in (True, False):
        x = torch.randn(2, weight.shape[0 if transposed else 1]).to(weight.dtype)
        found = _try(module, x)
        values = weight.detach().t() if transposed else weight.detach()
        if found is None or found.shape != (2, values.shape[0]):
            continue  # what follows may not fit its bias
        if torch.allclose(found, F.linear(x, values, bias), rtol=tolerance, atol=tolerance):
            return LinearForm(transposed)
    return None


_LINEAR_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _try(module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """Return the module's result on x, or None where it is no function of one such tensor."""
    forward: Callable[..., Any] = module.forward
    try:
        with torch.no_grad():
            result = forward(x)
    except Exception:  # any refusal by a user's module only means that it is something else
        return None
    return result if isinstance(result, torch.Tensor) else None


class Recognizer:
    """Remembers what each module was recognized as."""

    def __init__(self) -> None:
        self._found: dict[nn.Module, dict[str, Any]] = {}

    def activation(self, module: nn.Module) -> PostOp | None:
        found: PostOp | None = self._once("activation", activation_of_module, module)
        return found

    def norm(self, module: nn.Module) -> Norm | None:
        found: Norm | None = self._once("norm", norm_of_module, module)
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
        kinds = (self.linear(module), self.norm(module), self.activation(module))
        return any(kind is not None for kind in kinds)

    def within(self, module: nn.Module) -> Recognizer:
        """What is remembered of a module and those below it."""
        part = Recognizer()
        part._found = {m: self._found[m] for m in module.modules() if m in self._found}
        return part
