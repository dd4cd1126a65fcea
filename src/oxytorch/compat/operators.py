"""Operators of `torch.ops.torch_ipex`, in plain torch and by ops of oxytorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .. import ops


def split_float_bfloat16(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and the lower 16 bits of float32 values, both in tensors of bfloat16."""
    halves = tensor.contiguous().view(torch.int16).reshape(*tensor.shape, 2)
    lower, upper = (half.contiguous().view(torch.bfloat16) for half in halves.unbind(-1))
    return upper, lower


def cat_bfloat16_float(top: Tensor, trail: Tensor) -> Tensor:
    """The float32 values of two halves."""
    halves = torch.stack((trail.view(torch.int16), top.view(torch.int16)), dim=-1)
    return halves.flatten(-2).view(torch.float32)


def packed_add(top: Tensor, trail: Tensor, grad: Tensor, alpha: float) -> None:
    """Adds alpha times a gradient to the float32 values of two halves, in place."""
    values = cat_bfloat16_float(top, trail)
    values.add_(grad.to_dense().float() if grad.is_sparse else grad.float(), alpha=alpha)
    upper, lower = split_float_bfloat16(values)
    top.copy_(upper)
    trail.copy_(lower)


def interaction_forward(tensors: Sequence[Tensor]) -> Tensor:
    """The first features, then the dot products of all pairs."""
    return ops.interaction(tensors[0], tensors[1:])


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight."""
    return ops.rms_norm(x, weight, eps)


def add_softmax_(a: Tensor, b: Tensor) -> Tensor:
    """softmax(a + b) over the last dimension, written to a."""
    return a.copy_(torch.softmax(a + b, dim=-1))


def frozen_batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, eps: float
) -> Tensor:
    """Batch normalization by given statistics."""
    return functional.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)
