"""What convolutions share: their sizes, zeros around images, and the order of results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


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
