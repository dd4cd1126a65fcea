"""The arithmetic of every optimizer, written once.

Each optimizer has two functions. `<rule>_constants` turns hyper-parameters and the number of the
step into scalars and flags, in float64, once per tensor and step. `<rule>` updates one element: it
is run on tensors (the reference), and `translation` writes it in C++ when the library is built, in
Triton and in OpenCL C. Where there is a `<rule>_reduce_norms`, it runs before, and what it returns
beside operands is summed over the tensor; `<rule>_trust_ratio` turns the two sums, in float64, into
a factor of the update's `step_size`.

The functions know values only: + - * /, comparisons, calls of the functions below and of each
other, and `if` on a flag, which is settled when the code is translated. Arguments of an update are
operands (the parameter, the gradient, then the states: `Value`, or `Magnitude` if never negative)
and `c`, the scalars and flags of `<rule>_constants`; `<rule>_reduce_norms` takes the operands that
it needs, `<rule>_trust_ratio` hyper-parameters and `count`, the number of elements. An operand is
stored if it is returned. The order of operations is that of torch's single-tensor path,
`fused_multiply_add` included: results are the same bits.

One file, which the translators read: all rules and no other code.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

Value: TypeAlias = Any
Magnitude: TypeAlias = Any
Scalar: TypeAlias = float
Constants: TypeAlias = Any
Values: TypeAlias = tuple[Any, ...]


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


def sgd(parameter: Value, gradient: Value, momentum_buffer: Value, c: Constants) -> Values:
    """Stochastic gradient descent as torch.optim.SGD has it."""
    if c.penalizes:
        gradient = fused_multiply_add(parameter, c.penalty, gradient)
    if c.moves:
        if c.first:
            momentum_buffer = gradient
        else:
            momentum_buffer = fused_multiply_add(
                gradient, c.gradient_weight, momentum_buffer * c.momentum
            )
        if c.nesterov:
            gradient = fused_multiply_add(momentum_buffer, c.momentum, gradient)
        else:
            gradient = momentum_buffer
    parameter = fused_multiply_add(gradient, c.step_size, parameter)
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
    exp_avg_sq: Magnitude,
    max_exp_avg_sq: Magnitude,
    c: Constants,
) -> Values:
    """torch.optim.Adam and AdamW."""
    if c.decays:
        parameter = parameter * c.decay
    if c.penalizes:
        gradient = fused_multiply_add(parameter, c.penalty, gradient)
    exp_avg = lerp(exp_avg, gradient, c.first_weight)
    exp_avg_sq = fused_multiply_add(gradient * c.second_weight, gradient, exp_avg_sq * c.beta2)
    if c.amsgrad:
        max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq)
        denominator = sqrt(max_exp_avg_sq) / c.correction + c.eps
    else:
        denominator = sqrt(exp_avg_sq) / c.correction + c.eps
    parameter = parameter + exp_avg * c.step_size / denominator
    return parameter, exp_avg, exp_avg_sq, max_exp_avg_sq


def adagrad_constants(
    step: float, lr: float, lr_decay: float, weight_decay: float, eps: float
) -> dict[str, float]:
    """Adagrad (Duchi, Hazan and Singer 2011)."""
    return {
        "penalty": weight_decay,
        "eps": eps,
        "step_size": -(lr / (1 + (step - 1) * lr_decay)),
        "penalizes": weight_decay != 0,
    }


def adagrad(parameter: Value, gradient: Value, total: Magnitude, c: Constants) -> Values:
    """torch.optim.Adagrad."""
    if c.penalizes:
        gradient = fused_multiply_add(parameter, c.penalty, gradient)
    total = fused_multiply_add(gradient, gradient, total)
    parameter = parameter + gradient * c.step_size / (sqrt(total) + c.eps)
    return parameter, total


def rmsprop_constants(
    lr: float, alpha: float, eps: float, weight_decay: float, momentum: float, centered: bool
) -> dict[str, float]:
    """RMSprop (Hinton, lecture 6e of Neural Networks for Machine Learning, 2012)."""
    return {
        "penalty": weight_decay,
        "alpha": alpha,
        "weight": 1 - alpha,
        "eps": eps,
        "momentum": momentum,
        "step_size": -lr,
        "penalizes": weight_decay != 0,
        "centered": centered,
        "moves": momentum > 0,
    }


def rmsprop(
    parameter: Value,
    gradient: Value,
    square_avg: Magnitude,
    momentum_buffer: Value,
    grad_avg: Value,
    c: Constants,
) -> Values:
    """torch.optim.RMSprop."""
    if c.penalizes:
        gradient = fused_multiply_add(parameter, c.penalty, gradient)
    square_avg = fused_multiply_add(gradient * c.weight, gradient, square_avg * c.alpha)
    if c.centered:
        grad_avg = lerp(grad_avg, gradient, c.weight)
        average = sqrt(fused_multiply_add(-grad_avg, grad_avg, square_avg)) + c.eps
    else:
        average = sqrt(square_avg) + c.eps
    if c.moves:
        momentum_buffer = momentum_buffer * c.momentum + gradient / average
        parameter = fused_multiply_add(momentum_buffer, c.step_size, parameter)
    else:
        parameter = parameter + gradient * c.step_size / average
    return parameter, square_avg, momentum_buffer, grad_avg


def lion_constants(lr: float, beta1: float, beta2: float, weight_decay: float) -> dict[str, float]:
    """Lion (Chen and others, Symbolic Discovery of Optimization Algorithms, 2023)."""
    return {
        "decay": 1 - lr * weight_decay,
        "beta1": beta1,
        "first_weight": 1 - beta1,
        "beta2": beta2,
        "second_weight": 1 - beta2,
        "step_size": -lr,
        "decays": weight_decay != 0,
    }


def lion(parameter: Value, gradient: Value, exp_avg: Value, c: Constants) -> Values:
    """The sign of the interpolated momentum; NaN stays NaN."""
    if c.decays:
        parameter = parameter * c.decay
    mixed = fused_multiply_add(gradient, c.first_weight, exp_avg * c.beta1)
    sign = where(mixed > 0.0, 1.0, where(mixed < 0.0, -1.0, mixed))
    parameter = fused_multiply_add(sign, c.step_size, parameter)
    exp_avg = fused_multiply_add(gradient, c.second_weight, exp_avg * c.beta2)
    return parameter, exp_avg


def lamb_constants(
    step: float, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
) -> dict[str, float]:
    """Lamb (You and others, Large Batch Optimization for Deep Learning, 2020), no clamping."""
    return {
        "beta1": beta1,
        "first_weight": 1 - beta1,
        "beta2": beta2,
        "second_weight": 1 - beta2,
        "first_correction": 1 - beta1**step,
        "second_correction": 1 - beta2**step,
        "eps": eps,
        "penalty": weight_decay,
        "step_size": -lr,
        "penalizes": weight_decay != 0,
    }


def lamb_direction(
    exp_avg: Value,
    exp_avg_sq: Magnitude,
    first_correction: Scalar,
    second_correction: Scalar,
    eps: Scalar,
) -> Value:
    """Adam's direction without the decay of weights."""
    return exp_avg / first_correction / (sqrt(exp_avg_sq / second_correction) + eps)


def lamb_reduce_norms(
    parameter: Value, gradient: Value, exp_avg: Value, exp_avg_sq: Magnitude, c: Constants
) -> Values:
    """Updates the moments; sums the squares of the parameter and of its direction."""
    exp_avg = fused_multiply_add(gradient, c.first_weight, exp_avg * c.beta1)
    exp_avg_sq = fused_multiply_add(gradient * c.second_weight, gradient, exp_avg_sq * c.beta2)
    direction = lamb_direction(exp_avg, exp_avg_sq, c.first_correction, c.second_correction, c.eps)
    if c.penalizes:
        direction = fused_multiply_add(parameter, c.penalty, direction)
    return exp_avg, exp_avg_sq, parameter * parameter, direction * direction


def lamb(
    parameter: Value, gradient: Value, exp_avg: Value, exp_avg_sq: Magnitude, c: Constants
) -> Values:
    """The step along the direction."""
    direction = lamb_direction(exp_avg, exp_avg_sq, c.first_correction, c.second_correction, c.eps)
    if c.penalizes:
        direction = fused_multiply_add(parameter, c.penalty, direction)
    parameter = fused_multiply_add(direction, c.step_size, parameter)
    return (parameter,)


def lamb_trust_ratio(weight_squares: float, direction_squares: float) -> float:
    """|parameter| / |direction|, without bounds; 1 where either is zero."""
    return (
        weight_squares**0.5 / direction_squares**0.5
        if weight_squares > 0 and direction_squares > 0
        else 1.0
    )


def lars_constants(
    lr: float, momentum: float, eeta: float, weight_decay: float, epsilon: float, first: bool
) -> dict[str, float]:
    """Lars (You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, 2017)."""
    return {
        "penalty": weight_decay,
        "momentum": momentum,
        "step_size": -lr,
        "penalizes": weight_decay != 0,
        "moves": momentum != 0,
        "first": first,
    }


def lars_reduce_norms(parameter: Value, gradient: Value) -> Values:
    """Sums the squares of the parameter and of the gradient."""
    return parameter * parameter, gradient * gradient


def lars(parameter: Value, gradient: Value, momentum_buffer: Value, c: Constants) -> Values:
    """SGD with a learning rate of the tensor's own."""
    if c.penalizes:
        gradient = fused_multiply_add(parameter, c.penalty, gradient)
    if c.moves:
        if c.first:  # noqa: SIM108
            momentum_buffer = gradient
        else:
            momentum_buffer = momentum_buffer * c.momentum + gradient
        gradient = momentum_buffer
    parameter = fused_multiply_add(gradient, c.step_size, parameter)
    return parameter, momentum_buffer


def lars_trust_ratio(
    weight_squares: float,
    gradient_squares: float,
    eeta: float,
    weight_decay: float,
    epsilon: float,
) -> float:
    """eeta |parameter| / (|gradient| + weight_decay |parameter| + epsilon), 1 where one is zero."""
    return (
        eeta
        * weight_squares**0.5
        / (gradient_squares**0.5 + weight_decay * weight_squares**0.5 + epsilon)
        if weight_squares > 0 and gradient_squares > 0
        else 1.0
    )


def adafactor_constants(
    step: float,
    lr: float,
    beta2_decay: float,
    eps1: float,
    eps2: float,
    d: float,
    weight_decay: float,
    is_factored: bool,
) -> dict[str, float]:
    """Adafactor (Shazeer and Stern 2018) as torch.optim.Adafactor has it.

    is_factored: the variance is the product of a row and a column, which are up to date.
    """
    return {
        "decay": 1 - lr * weight_decay,
        "weight": step**beta2_decay,
        "least": eps1 * eps1,
        "step_size": -min(lr, 1 / step**0.5),
        "decays": weight_decay != 0,
        "is_whole": not is_factored,
    }


def adafactor_direction(gradient: Value, variance: Magnitude, least: Scalar) -> Value:
    """The gradient in units of its root mean square."""
    return gradient / sqrt(where(variance < least, least, variance))


def adafactor_reduce_norms(
    parameter: Value, gradient: Value, variance: Magnitude, c: Constants
) -> Values:
    """Updates the variance; sums the squares of the parameter and of the direction."""
    if c.is_whole:
        variance = lerp(variance, gradient * gradient, c.weight)
    direction = adafactor_direction(gradient, variance, c.least)
    return variance, parameter * parameter, direction * direction


def adafactor(parameter: Value, gradient: Value, variance: Magnitude, c: Constants) -> Values:
    """The step along the direction."""
    if c.decays:
        parameter = parameter * c.decay
    direction = adafactor_direction(gradient, variance, c.least)
    parameter = fused_multiply_add(direction, c.step_size, parameter)
    return (parameter,)


def adafactor_trust_ratio(
    weight_squares: float, direction_squares: float, count: float, eps2: float, d: float
) -> Any:
    """max(eps2, RMS(parameter)) / max(1, RMS(direction) / d)."""
    return max(eps2, (weight_squares / count) ** 0.5) / max(
        1.0, (direction_squares / count) ** 0.5 / d
    )
