"""What convolutions share: their sizes, zeros around images, and the order of results."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from ..panels.epilogues import ACTIVATIONS, ADDED


def channels_last(x: Tensor) -> Tensor:
    """A copy of [images, channels, *spatial] whose channels lie side by side."""
    return x.movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1)


def padded(x: Tensor, padding: Sequence[int]) -> Tensor:
    """x with zeros before and after each spatial dimension, as many as `padding` says in turn."""
    pairs = [*zip(padding[::2], padding[1::2], strict=True)][::-1]
    return F.pad(x, [size for pair in pairs for size in pair])


def positions(
    shape: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """The spatial sizes of a convolution's result; `shape` is that of its images."""
    return [
        (size + sum(padding[2 * i : 2 * i + 2]) - dilation[i] * (kernel_size[i] - 1) - 1)
        // stride[i]
        + 1
        for i, size in enumerate(shape[2:])
    ]


Geometry = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""stride, padding and dilation of a convolution, as the ops take them."""


def result_count(
    x: Tensor, out_channels: int, kernel_size: Sequence[int], geometry: Geometry
) -> int:
    """How many values a convolution of x has."""
    return prod([x.shape[0], out_channels, *positions(x.shape, kernel_size, *geometry)])


def convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    geometry: Geometry,
    groups: int,
    epilogue: str,
) -> Tensor:
    """epilogue(convolution(x, weight) + bias) in plain PyTorch, in float32 or wider.

    weight: [out_channels, in_channels / groups, *kernel]. The others are those of the ops. The
    result has x's dtype and is in channels-last order.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    stride, padding, dilation = geometry
    none = [0] * len(stride)
    images = padded(x.to(wide), padding)
    wide_bias = None if bias is None else bias.to(wide)
    result = torch.convolution(
        images, weight.to(wide), wide_bias, stride, none, dilation, False, none, groups
    )
    result = ACTIVATIONS[epilogue](result)
    if epilogue in ADDED:
        assert other is not None
        result = ADDED[epilogue](result + other.to(wide))
    return channels_last(result.to(x.dtype))


def sample_geometry(kernel: Sequence[int], stride: int, padding: int, dilation: int) -> Geometry:
    """The geometry of a sample, with more zeros after than before in some."""
    dims = len(kernel)
    return [stride] * dims, [padding, padding + (stride == 2)] * dims, [dilation] * dims
