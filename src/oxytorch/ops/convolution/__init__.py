"""Convolution with a weight packed once, and what follows it in the same sweep.

The arithmetic runs in oneDNN inside torch, which chooses among AVX2, AVX-512, BF16 and AMX.
Results come in channels-last order, the order that oneDNN's kernels like best.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from ...core.packed import PackedTensor
from .._post_op import NO_POST_OP, PostOp

_MKLDNN = torch.ops.mkldnn
_PLAIN = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class Geometry:
    """Stride, padding and dilation, one number for each spatial dimension, and groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def padded(self, extra: tuple[int, ...]) -> Geometry:
        """The same with more zeros around the input."""
        padding = tuple(p + e for p, e in zip(self.padding, extra, strict=True))
        return Geometry(self.stride, padding, self.dilation, self.groups)

    def with_height(self) -> Geometry:
        """The same convolution over one more spatial dimension of size 1."""
        return Geometry((1, *self.stride), (0, *self.padding), (1, *self.dilation), self.groups)


class PackedConvolutionWeight(PackedTensor):
    """A weight [out_channels, in_channels / groups, *kernel] in oneDNN's blocked order.

    weight: the values; 1, 2 or 3 spatial dimensions. dtype: that of the stored values.
    scale: see `PackedTensor`; float32 [out_channels].
    input_size: the usual input's shape, where known: oneDNN may choose a better order for it.
    """

    geometry: Geometry
    input_size: tuple[int, ...] | None = None
    _shared_fields = (*PackedTensor._shared_fields, "geometry", "input_size")

    def __new__(
        cls,
        weight: torch.Tensor,
        geometry: Geometry,
        *,
        dtype: torch.dtype | None = None,
        scale: torch.Tensor | None = None,
        input_size: tuple[int, ...] | None = None,
    ) -> PackedConvolutionWeight:
        result = PackedTensor._wrap(cls, weight, dtype)
        result.geometry, result.scale, result.input_size = geometry, scale, input_size
        result.repack(weight)
        return result

    @property
    def kernel_geometry(self) -> Geometry:
        """The geometry that oneDNN sees: a 1-D convolution runs as a 2-D one of height 1."""
        return self.geometry.with_height() if self.dim() == 3 else self.geometry

    def _pack(self, stored: torch.Tensor) -> torch.Tensor:
        size = self.input_size
        if self.dim() == 3:
            stored = stored.unsqueeze(2)
            size = None if size is None else (*size[:2], 1, *size[2:])
        g = self.kernel_geometry
        packed: torch.Tensor = _MKLDNN._reorder_convolution_weight.default(
            stored, g.padding, g.stride, g.dilation, g.groups, size
        )
        return packed

    def _unpack(self) -> torch.Tensor:
        plain: torch.Tensor = self.packed.to_dense()
        return plain.reshape(self.shape)


def convolution(
    x: torch.Tensor,
    weight: PackedConvolutionWeight,
    bias: torch.Tensor | None = None,
    post_op: PostOp = NO_POST_OP,
    other: torch.Tensor | None = None,
    extra_padding: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Compute post_op(scale * convolution(x, weight) + bias), scale being the weight's, if any.

    x: [batch, channels, *spatial] or [channels, *spatial]; cast to the weight's dtype if needed.
    bias: [out_channels]. other: the second operand of `post_op.binary`, of the result's shape.
    extra_padding: zeros on both sides of each spatial dimension, besides the layer's own padding.
    Returns the result in the weight's dtype. Products are accumulated in float32.
    Differentiable: the backward pass is that of the plain formula over the restored weight.
    """
    if x.dtype != weight.dtype:
        x = x.to(weight.dtype)
    if torch.is_grad_enabled() and (
        x.requires_grad
        or weight.requires_grad
        or (bias is not None and bias.requires_grad)
        or (other is not None and other.requires_grad)
    ):
        return reference(x, weight, bias, post_op, other, extra_padding)
    if x.numel() == 0 or x.dim() != weight.dim():
        return reference(x, weight, bias, post_op, other, extra_padding)
    g = weight.kernel_geometry
    if extra_padding is not None:
        g = g.padded((0,) * (len(g.padding) - len(extra_padding)) + extra_padding)
    if weight.dim() == 3:
        x = x.unsqueeze(2)
        other = None if other is None else other.unsqueeze(2)
    result: torch.Tensor
    if post_op.binary is None:
        result = _MKLDNN._convolution_pointwise.default(
            x, weight.packed, bias, g.padding, g.stride, g.dilation, g.groups,
            post_op.name, post_op.scalars, post_op.algorithm,
        )  # fmt: skip
    elif other is not None and _fits(x, other, weight, g) and post_op.name in ("none", "relu"):
        unary = None if post_op.name == "none" else post_op.name
        result = _MKLDNN._convolution_pointwise.binary(
            x, other, weight.packed, bias, g.padding, g.stride, g.dilation, g.groups,
            post_op.binary, 1.0, unary, [], None,
        )  # fmt: skip
    else:
        result = _MKLDNN._convolution_pointwise.default(
            x, weight.packed, bias, g.padding, g.stride, g.dilation, g.groups, "none", [], ""
        )
        result = post_op.after(result, other)
    return result.squeeze(2) if weight.dim() == 3 else result


def _fits(
    x: torch.Tensor, other: torch.Tensor, weight: PackedConvolutionWeight, g: Geometry
) -> bool:
    """Whether `other` has exactly the result's dtype and shape (nothing is broadcast)."""
    if other.dtype != weight.dtype or other.dim() != x.dim() or other.shape[0] != x.shape[0]:
        return False
    kernel = (1, *weight.shape[2:]) if weight.dim() == 3 else weight.shape[2:]
    return other.shape[1] == weight.shape[0] and all(
        other.shape[i + 2]
        == (x.shape[i + 2] + 2 * g.padding[i] - g.dilation[i] * (kernel[i] - 1) - 1) // g.stride[i]
        + 1
        for i in range(len(kernel))
    )


def reference(
    x: torch.Tensor,
    weight: PackedConvolutionWeight,
    bias: torch.Tensor | None = None,
    post_op: PostOp = NO_POST_OP,
    other: torch.Tensor | None = None,
    extra_padding: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """The same in plain PyTorch."""
    g = weight.geometry if extra_padding is None else weight.geometry.padded(extra_padding)
    values: torch.Tensor = weight * 1  # an operation that autograd records, on restored values
    if weight.scale is not None:
        values = (values * weight._column(weight.scale)).to(weight.dtype)
    convolve: Any = _PLAIN[weight.dim() - 2]
    result = convolve(x, values, bias, g.stride, g.padding, g.dilation, g.groups)
    return post_op.after(result, other)
