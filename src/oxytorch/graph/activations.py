"""The activations that modules and functions compute, as post-operations."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..ops.post_op import PostOp
from .agreement import RECOGNIZED
from .formula import expression, result_of


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
        nn.SiLU: "silu",
        nn.Sigmoid: "sigmoid",
        nn.Tanh: "tanh",
        nn.Hardswish: "hardswish",
        nn.Hardsigmoid: "hardsigmoid",
    }
    if kind in simple:
        return PostOp(simple[kind])
    if kind.__module__.startswith("torch.nn") or not _stateless(module):
        return None
    return _by_formula(module.forward, module)


def activation_of_callable(function: Callable[..., Any]) -> PostOp | None:
    """Return the post-operation that a module or a function of one tensor computes, or None."""
    if isinstance(function, nn.Module):
        return activation_of_module(function)
    return _by_formula(function, nn.Module())


def _stateless(module: nn.Module) -> bool:
    state = (*module.parameters(), *module.buffers(), *module._forward_hooks.values())
    return not state and not module._forward_pre_hooks and type(module) is not nn.Module


def _by_formula(run: Callable[..., Any], module: nn.Module) -> PostOp | None:
    x = torch.cat(
        [torch.linspace(-50, 50, 101, device="cpu"), torch.tensor(_SPECIAL, device="cpu")]
    ).reshape(1, -1)
    more = x.expand(2, 3, 1, -1).contiguous()  # where flattening, for example, changes something
    post_op, other = (_formulas().get(expression(run, given, {}, module)) for given in (x, more))
    if post_op is None or post_op != other:
        return None
    tolerance = RECOGNIZED[x.dtype]
    for given in (x, more):
        found, expected = result_of(run, module, given), post_op.after(given)
        if found is None or found.shape != given.shape:
            return None
        if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
            return None
    return post_op


_SPECIAL = (0.0, -0.0, 1e-30, 1e30, -1e30, math.inf, -math.inf, math.nan)


@functools.cache
def _formulas() -> dict[Any, PostOp]:
    """The activations that we know, by the expressions of the ways in which models spell them."""
    root, factor = math.sqrt(2.0), math.sqrt(2.0 / math.pi)
    spelled: list[tuple[PostOp, Callable[[torch.Tensor], torch.Tensor]]] = [
        (PostOp("relu"), F.relu),
        (PostOp("relu"), lambda x: x.clamp(min=0)),
        (PostOp("gelu", (), "none"), F.gelu),
        (PostOp("gelu", (), "none"), lambda x: 0.5 * x * (1 + torch.erf(x / root))),
        (PostOp("gelu", (), "tanh"), lambda x: F.gelu(x, approximate="tanh")),
        (PostOp("gelu", (), "tanh"),
         lambda x: 0.5 * x * (1 + torch.tanh(factor * (x + 0.044715 * x**3)))),
        (PostOp("gelu", (), "tanh"),
         lambda x: 0.5 * x * (1 + torch.tanh(factor * x * (1 + 0.044715 * x * x)))),
        (PostOp("gelu", (), "tanh"),
         lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * x * (1 + 0.044715 * x * x)))),
        (PostOp("silu"), F.silu),
        (PostOp("silu"), lambda x: x * torch.sigmoid(x)),
        (PostOp("sigmoid"), torch.sigmoid),
        (PostOp("tanh"), torch.tanh),
        (PostOp("hardswish"), F.hardswish),
        (PostOp("hardswish"), lambda x: x * F.relu6(x + 3) / 6),
        (PostOp("hardsigmoid"), F.hardsigmoid),
        (PostOp("hardsigmoid"), lambda x: F.relu6(x + 3) / 6),
        (PostOp("hardtanh", (0.0, 6.0)), F.relu6),
        (PostOp("hardtanh", (0.0, 6.0)), lambda x: x.clamp(0, 6)),
        (PostOp("hardtanh", (-1.0, 1.0)), F.hardtanh),
        (PostOp("hardtanh", (-1.0, 1.0)), lambda x: x.clamp(-1, 1)),
    ]  # fmt: skip
    x = torch.zeros(1, 2, device="cpu")
    return {expression(run, x, {}): post_op for post_op, run in spelled}


def activation_of_function(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> PostOp | None:
    """Return the post-operation of a function or tensor-method call, or None."""
    name = _FUNCTIONS.get(target)
    if name is None:
        return None
    rest = [*args[1:]]
    if name == "gelu":
        return PostOp("gelu", (), str(kwargs.get("approximate", rest[0] if rest else "none")))
    if name == "leaky_relu":
        slope = kwargs.get("negative_slope", (rest or [0.01])[0])
        return PostOp("leaky_relu", (float(slope),)) if is_number(slope) else None
    if name == "relu6":
        return PostOp("hardtanh", (0.0, 6.0))
    if name in ("clamp", "hardtanh"):
        low, high = ("min", "max") if name == "clamp" else ("min_val", "max_val")
        default = [None, None] if name == "clamp" else [-1.0, 1.0]
        given = [*rest[:2], *default[len(rest[:2]) :]]
        bounds = (kwargs.get(low, given[0]), kwargs.get(high, given[1]))
        if not all(map(is_number, bounds)):
            return None
        return PostOp("hardtanh", (float(bounds[0]), float(bounds[1])))
    if name in ("relu", "sigmoid", "tanh", "silu", "hardswish", "hardsigmoid"):
        return PostOp(name)
    return None


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


_FUNCTIONS: dict[Any, str] = {
    F.gelu: "gelu",
    F.hardswish: "hardswish",
    F.hardsigmoid: "hardsigmoid",
    F.leaky_relu: "leaky_relu",
    F.relu6: "relu6",
    F.hardtanh: "hardtanh",
    **{
        function: name.rstrip("_")
        for name in ("relu", "relu_", "sigmoid", "sigmoid_", "tanh", "tanh_", "silu", "clamp",
                     "clamp_")
        for owner in (torch, F, torch.Tensor)
        if (function := getattr(owner, name, None)) is not None
    },
}  # fmt: skip
