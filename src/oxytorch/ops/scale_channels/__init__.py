"""Images whose channels are multiplied with a factor each, as squeeze-and-excitation does it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._binding import with_kernel
from .._op import Cost, Sample, register
from .._samples import shape_name, values
from ..windows import channels_last


@with_kernel
def scale_channels(x: Tensor, factors: Tensor) -> Tensor:
    """Returns x * factors.

    x: [images, channels, *spatial] with 1 to 3 spatial sizes, float32, bfloat16 or float16; a copy
        is made where its channels do not lie side by side (channels-last order).
    factors: [images, channels, *ones], of x's dtype.

    Returns x's shape and dtype, in channels-last order. Computes in float32, rounds once. float64
    and other devices run plain PyTorch.
    Raises RuntimeError if a shape or dtype does not fit.
    """
    return channels_last(x * factors)


_SHAPES = ((1, 8, 7, 7), (2, 33, 5, 6), (3, 17, 9), (1, 64, 3, 4, 5), (2, 1, 4, 4), (1, 100, 1, 1),
           (0, 8, 4, 4), (2, 500, 30, 1))  # fmt: skip


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    many = ((1, 512, 14, 14),) if size == "cache" else ((64, 512, 56, 56),)
    for shape in _SHAPES if size == "test" else many:
        ones = [1] * (len(shape) - 2)
        factors = values(*shape[:2], *ones, dtype=dtype)
        yield Sample(shape_name(shape), (channels_last(values(*shape, dtype=dtype)), factors))


def cost(x: Tensor, factors: Tensor) -> Cost:
    """Reads x and the factors, writes the result."""
    return Cost(2 * x.nbytes + factors.nbytes, x.numel())


op = register(scale_channels, samples, cost)
