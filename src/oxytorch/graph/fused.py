"""The calls that a region makes in place of several steps.

Each reads its modules' parameters at every call, so new values are seen at once. Where a weight is
not packed, or an input is not what the kernel takes, the modules themselves are called. Our kernels
return torch's order in memory; operands in another one are combined by torch, whose result has
theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..core.sources import Sources
from ..ops.convolution import PackedConvolutionWeight, convolution, takes
from ..ops.linear import PackedLinearWeight, linear
from ..ops.post_op import NO_POST_OP, PostOp
from .boundary import Boundary, is_still
from .formats import is_last, kept, order_is_free
from .recognize import BatchNorm, RecognizedNorm, batch_norm_of_module, holds_its_parameters

_COMPUTED = (torch.float32, torch.bfloat16, torch.float16)


def is_computed(x: Tensor) -> bool:
    """Whether our kernels compute with such a tensor."""
    return x.dtype in _COMPUTED and x.device.type == "cpu"


class Folded:
    """A batch normalization with fixed statistics as one factor and one shift per channel.

    scale = gamma / sqrt(variance + eps); the layer's new bias is (bias - mean) * scale + beta.
    Both are computed again where one of the tensors that they come from has changed.
    """

    def __init__(self, layer: nn.Module, norm: nn.Module, found: BatchNorm) -> None:
        self.layer = layer
        self.norm = norm
        self._compute(found)

    def _compute(self, norm: BatchNorm) -> None:
        layer_bias = self.layer._parameters["bias"]
        self.sources = Sources([self.norm], [] if layer_bias is None else [layer_bias])
        self._layer_bias = layer_bias
        with torch.inference_mode(False), torch.no_grad():
            scale = (norm.variance.double() + norm.eps).rsqrt()
            if norm.weight is not None:
                scale = scale * norm.weight
            mean = norm.mean.double()
            shift = -mean if layer_bias is None else layer_bias.double() - mean
            shift = shift * scale if norm.bias is None else shift * scale + norm.bias
            weight = self.layer._parameters["weight"]
            assert weight is not None
            self.scale, self.bias = scale.float(), shift.to(weight.dtype)

    def update(self, weight: PackedConvolutionWeight | PackedLinearWeight) -> Tensor | None:
        """Bring a packed weight up to date; return the bias that goes with it, or None where there
        is nothing to fold any more."""
        if not holds_its_parameters(self.layer):
            return None
        same_bias = self.layer._parameters["bias"] is self._layer_bias
        if not (same_bias and self.bias.dtype == weight.dtype and self.sources.are_current()):
            norm = batch_norm_of_module(self.norm)
            if norm is None:
                return None
            self._compute(norm)
        if weight.scale is not self.scale:
            weight.fold(self.scale)
        return self.bias


class FusedLayer:
    """A linear layer or convolution with what was around it: zero padding before, a normalization
    folded in, a post-operation after.

    converts: whether inputs of other floating dtypes are converted to the weight's.
    boundary: of a layer that keeps its dtype and returns another one.
    """

    def __init__(
        self,
        module: nn.Module,
        post_op: PostOp = NO_POST_OP,
        folded: Folded | None = None,
        padding: tuple[int, ...] | None = None,
        converts: bool = False,
        boundary: Boundary | None = None,
    ) -> None:
        self.module = module
        self.post_op = post_op
        self.folded = folded
        self.padding = padding
        self.converts = converts or boundary is not None
        self.boundary = boundary
        self._is_refused = False  # whether oneDNN does not take the second operand

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        weight: Any = self.module._parameters.get("weight")
        kind = type(weight)
        if kind is PackedLinearWeight or kind is PackedConvolutionWeight:
            try:
                found = self._packed(x, weight, other)
            except RuntimeError:  # the modules run, or say themselves what is wrong
                self._is_refused = other is not None
                found = None
            if found is not None:
                return found
        if self.padding is not None:
            x = F.pad(x, [side for p in reversed(self.padding) for side in (p, p)])
        result = self.module(x)
        if self.folded is not None:
            result = self.folded.norm(result)
        return self.post_op.after(result, other)

    def _packed(self, x: Tensor, weight: Any, other: Tensor | None) -> Tensor | None:
        if not weight.is_packed() or "bias" not in self.module._parameters:
            return None
        if x.dtype is not weight.dtype:
            if not self.converts or not x.is_floating_point():
                return None
            x = x.to(weight.dtype)
        returns = self._returned(weight)
        if self.folded is not None:
            bias: Tensor | None = self.folded.update(weight)
            if bias is None:
                return None
        else:
            bias = self.module._parameters["bias"]
            if weight.scale is not None:
                weight.fold(None)
        is_linear = type(weight) is PackedLinearWeight
        if not is_linear and not takes(x, weight):
            return None
        post_op = self.post_op
        combines_later = other is not None and (
            self._is_refused
            or returns is not None
            or not _keeps_order(None if is_linear else x, other)
        )
        if combines_later:
            post_op = NO_POST_OP
        second = None if combines_later else other
        if is_linear:
            result = linear(x, weight, bias, post_op, second)
        else:
            result = kept(convolution(x, weight, bias, post_op, second, self.padding), x)
        if returns is not None:
            result = result.to(returns)
        return self.post_op.after(result, other) if combines_later else result

    def _returned(self, weight: Tensor) -> torch.dtype | None:
        """The dtype that the result is converted to, if to another one."""
        boundary = self.boundary
        if boundary is None or boundary.returns is None or boundary.takes is not weight.dtype:
            return None
        is_other = boundary.returns is not weight.dtype
        return (
            boundary.returns if is_other and is_still(boundary.beside, boundary.returns) else None
        )


def _keeps_order(x: Tensor | None, other: Tensor) -> bool:
    """Whether torch's result of a binary operation has the order of its other operand: that of a
    convolution of x, or of a linear layer."""
    if x is None or not is_last(x):
        return other.is_contiguous() or (x is not None and order_is_free())
    return is_last(other)


class FusedAddNorm:
    """Residual addition and the normalization of the sum, in one sweep.

    Returns the normalized sum, or with keep_total (normalized, sum).
    """

    def __init__(
        self, module: nn.Module, norm: RecognizedNorm, keep_total: bool, is_mixed: bool = False
    ) -> None:
        self.module = module
        self.norm = norm
        self.keep_total = keep_total
        self.is_mixed = is_mixed or type(module) is nn.LayerNorm
        self.names = [*module._parameters]

    def __call__(self, x: Tensor, residual: Tensor) -> Any:
        parameters = self.module._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        same = x.shape == residual.shape and x.dtype == residual.dtype and is_computed(x)
        same = same and holds_its_parameters(self.module, self.names)
        same = same and x.is_contiguous() and residual.is_contiguous()
        if not same or not (self.is_mixed or weight is None or weight.dtype == x.dtype):
            total = x + residual
            normed = self.module(total)
            return (normed, total) if self.keep_total else normed
        if self.norm.kind == "rms_norm":
            return ops.add_rms_norm(x, residual, weight, self.norm.eps, self.keep_total)
        return ops.add_layer_norm(x, residual, weight, bias, self.norm.eps, self.keep_total)


class FusedGate:
    """activation(gate) * up in one sweep, for GELU and SiLU.

    gate_first: whether activation(gate) is the first operand.
    """

    def __init__(self, post_op: PostOp, gate_first: bool) -> None:
        self.post_op = post_op
        self.gate_first = gate_first

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        same = gate.shape == up.shape and gate.dtype == up.dtype and is_computed(gate)
        if not (same and gate.is_contiguous() and up.is_contiguous()):
            active = self.post_op.after(gate)
            return active * up if self.gate_first else up * active
        if self.post_op.name == "gelu":
            return ops.gelu_mul(gate, up, self.post_op.algorithm)
        return ops.silu_mul(gate, up)


__all__ = ["Folded", "FusedAddNorm", "FusedGate", "FusedLayer"]
