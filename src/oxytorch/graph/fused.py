"""The calls that a rewritten graph makes in place of several nodes.

Each reads its modules' parameters at every call, so new values (a loaded checkpoint, a packed
weight) are seen at once. Where a weight is not packed the same formula runs in plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .. import ops
from ..ops._post_op import NO_POST_OP, PostOp
from ..ops.convolution import PackedConvolutionWeight, convolution
from ..ops.linear import PackedLinearWeight, linear
from .recognize import Norm

BatchNorm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Folded:
    """A batch normalization in evaluation mode as one factor and one shift per channel.

    scale = gamma / sqrt(variance + eps); the layer's new bias is (bias - mean) * scale + beta.
    """

    def __init__(self, layer: nn.Module, norm: nn.Module) -> None:
        self.layer = layer
        self.norm = norm
        self.scale, self.bias = self._computed()

    def _computed(self) -> tuple[torch.Tensor, torch.Tensor]:
        buffers, parameters = self.norm._buffers, self.norm._parameters
        variance, mean = buffers["running_var"], buffers["running_mean"]
        assert variance is not None and mean is not None
        scale = (variance.double() + self.norm.eps).rsqrt()  # type: ignore[operator]
        gamma, beta = parameters["weight"], parameters["bias"]
        if gamma is not None:
            scale = scale * gamma.detach()
        bias = self.layer._parameters["bias"]
        shift = -mean.double() if bias is None else bias.detach().double() - mean
        shift = shift * scale if beta is None else shift * scale + beta.detach()
        return scale.float(), shift.float()

    def refresh(self) -> None:
        """Fold again, after the layer's or the normalization's values have changed."""
        dtype = self.bias.dtype
        scale, bias = self._computed()
        self.scale, self.bias = scale, bias.to(dtype)
        weight = self.layer._parameters["weight"]
        if isinstance(weight, (PackedConvolutionWeight, PackedLinearWeight)):
            values = weight.dense()
            weight.scale = scale
            weight.repack(values)


class FusedLayer:
    """A linear layer or convolution with what was around it: zero padding before, a normalization
    folded in, a post-operation after."""

    def __init__(
        self,
        module: nn.Module,
        post_op: PostOp = NO_POST_OP,
        folded: Folded | None = None,
        padding: tuple[int, ...] | None = None,
    ) -> None:
        self.module = module
        self.post_op = post_op
        self.folded = folded
        self.padding = padding

    def __call__(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        parameters = self.module._parameters
        weight: torch.Tensor | None = parameters["weight"]
        bias = parameters["bias"] if self.folded is None else self.folded.bias
        if type(weight) is PackedLinearWeight:
            return linear(x, weight, bias, self.post_op, other)
        if type(weight) is PackedConvolutionWeight:
            return convolution(x, weight, bias, self.post_op, other, self.padding)
        if self.padding is not None:
            x = F.pad(x, [side for p in reversed(self.padding) for side in (p, p)])
        result = self.module(x)
        if self.folded is not None:
            result = self.folded.norm(result)
        return self.post_op.after(result, other)


class FusedAddNorm:
    """Residual addition and the normalization of the sum, in one sweep.

    Returns the normalized sum, or with keep_total (normalized, sum).
    """

    def __init__(self, module: nn.Module, norm: Norm, keep_total: bool) -> None:
        self.module = module
        self.norm = norm
        self.keep_total = keep_total

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> Any:
        weight = self.module._parameters["weight"]
        if x.shape != residual.shape or x.dtype != residual.dtype:
            total = x + residual
            normed = self.module(total)
            return (normed, total) if self.keep_total else normed
        if self.norm.kind == "rms_norm":
            return ops.add_rms_norm(x, residual, weight, self.norm.eps, self.keep_total)
        bias = self.module._parameters["bias"]
        return ops.add_layer_norm(x, residual, weight, bias, self.norm.eps, self.keep_total)


class FusedGate:
    """activation(gate) * up in one sweep; kind is "gelu" or "silu"."""

    def __init__(self, post_op: PostOp) -> None:
        self.post_op = post_op

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if gate.shape != up.shape or gate.dtype != up.dtype:
            return self.post_op.after(gate) * up
        if self.post_op.name == "gelu":
            return ops.gelu_mul(gate, up, self.post_op.algorithm)
        return ops.silu_mul(gate, up)


__all__ = ["BatchNorm", "Folded", "FusedAddNorm", "FusedGate", "FusedLayer"]
