"""The arithmetic of every optimizer, written once.

Each optimizer has two functions. `<rule>_constants` turns hyper-parameters and the number of the
step into scalars, in float64, once per tensor and step. `<rule>` updates one element: it is run on
tensors (the reference), and `tools/translate_rules.py` turns it into the C++ of every level when
the library is built. `<rule>_measure`, where there is one, returns the quantities that are summed
over the tensor before its update.

The functions know values only: + - * /, comparisons, calls of the functions below and of each
other, and `if` on a flag, which is settled when the code is translated. Arguments are operands
(`Value`: the parameter, the gradient, then the states), then scalars, then flags; an operand is
stored if it is returned. The order of operations is that of torch's single-tensor path,
`fused_multiply_add` included: results are the same bits.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

Value: TypeAlias = Any
Scalar: TypeAlias = float
Flag: TypeAlias = bool


def sqrt(x: Tensor) -> Tensor:
    """The square root, correctly rounded (torch.sqrt may be a unit off: it asks MKL)."""
    return torch.sqrt(x.double()).to(x.dtype)


def where(condition: Value, x: Value, y: Value) -> Value:
    """x where the condition holds, else y."""
    if isinstance(condition, bool):
        return x if condition else y
    return torch.where(condition, x, y)


def maximum(x: Tensor, y: Tensor) -> Tensor:
    """The larger of two values; NaN if either is."""
    return torch.maximum(x, y)


def fused_multiply_add(x: Tensor, y: Tensor | float, z: Tensor) -> Tensor:
    """x y + z, rounded once (where torch has vector instructions for it)."""
    return torch.addcmul(z, x, y) if isinstance(y, Tensor) else torch.add(z, x, alpha=y)


def lerp(start: Value, end: Value, weight: Scalar) -> Value:
    """start + weight (end - start), from the nearer side, as torch.lerp computes it."""
    nearer = where(weight < 0.5, start, end)
    return fused_multiply_add(end - start, where(weight < 0.5, weight, weight - 1.0), nearer)


def sgd_constants(
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
) -> dict[str, float]:
    """first: the momentum buffer does not exist yet and begins as the gradient."""
    return {
        "penalty": weight_decay,
        "momentum": momentum,
        "gradient_weight": 1 - dampening,
        "step_size": -lr,
        "penalizes": weight_decay != 0,
        "moves": momentum != 0,
        "first": first,
        "nesterov": nesterov,
    }


def sgd(
    parameter: Value,
    gradient: Value,
    momentum_buffer: Value,
    penalty: Scalar,
    momentum: Scalar,
    gradient_weight: Scalar,
    step_size: Scalar,
    penalizes: Flag,
    moves: Flag,
    first: Flag,
    nesterov: Flag,
) -> tuple[Value, ...]:
    """Stochastic gradient descent as torch.optim.SGD has it."""
    if penalizes:
        gradient = fused_multiply_add(parameter, penalty, gradient)
    if moves:
        if first:
            momentum_buffer = gradient
        else:
            momentum_buffer = fused_multiply_add(
                gradient, gradient_weight, momentum_buffer * momentum
            )
        if nesterov:
            gradient = fused_multiply_add(momentum_buffer, momentum, gradient)
        else:
            gradient = momentum_buffer
    parameter = fused_multiply_add(gradient, step_size, parameter)
    return parameter, momentum_buffer


def adam_constants(
    step: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    decoupled_weight_decay: bool,
) -> dict[str, float]:
    """Adam (Kingma and Ba 2015) and, decoupled, AdamW (Loshchilov and Hutter 2019)."""
    return {
        "decay": 1 - lr * weight_decay,
        "penalty": weight_decay,
        "first_weight": 1 - beta1,
        "beta2": beta2,
        "second_weight": 1 - beta2,
        "correction": (1 - beta2**step) ** 0.5,
        "eps": eps,
        "step_size": -(lr / (1 - beta1**step)),
        "decays": weight_decay != 0 and decoupled_weight_decay,
        "penalizes": weight_decay != 0 and not decoupled_weight_decay,
        "amsgrad": amsgrad,
    }


def adam(
    parameter: Value,
    gradient: Value,
    exp_avg: Value,
    exp_avg_sq: Value,
    max_exp_avg_sq: Value,
    decay: Scalar,
    penalty: Scalar,
    first_weight: Scalar,
    beta2: Scalar,
    second_weight: Scalar,
    correction: Scalar,
    eps: Scalar,
    step_size: Scalar,
    decays: Flag,
    penalizes: Flag,
    amsgrad: Flag,
) -> tuple[Value, ...]:
    """torch.optim.Adam and AdamW."""
    if decays:
        parameter = parameter * decay
    if penalizes:
        gradient = fused_multiply_add(parameter, penalty, gradient)
    exp_avg = lerp(exp_avg, gradient, first_weight)
    exp_avg_sq = fused_multiply_add(gradient * second_weight, gradient, exp_avg_sq * beta2)
    if amsgrad:
        max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq)
        denominator = sqrt(max_exp_avg_sq) / correction + eps
    else:
        denominator = sqrt(exp_avg_sq) / correction + eps
    parameter = parameter + exp_avg * step_size / denominator
    return parameter, exp_avg, exp_avg_sq, max_exp_avg_sq
