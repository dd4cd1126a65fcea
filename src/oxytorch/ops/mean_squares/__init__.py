"""Means of squares over the rows and over the columns of matrices, as Adafactor needs them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._binding import with_kernel
from .._op import Cost, Sample, register
from .._samples import MEBI, WIDTHS, rows_of_bytes, shape_name, values


@with_kernel
def mean_squares(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the means of x * x over the last and over the last but one dimension.

    x: [..., height, width], float32, bfloat16 or float16, any strides; it is read
    once. Returns float32 [..., height, 1] and [..., 1, width], contiguous. Squares and sums are
    float32, but sums of strips of 32 rows are added in float64. float64 and
    other devices run plain PyTorch. Raises RuntimeError if a dtype, device or shape does not fit.
    Source: Shazeer and Stern, Adafactor, 2018, algorithm 2.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    squares = wide.square().contiguous()
    return squares.mean(-1, keepdim=True), squares.mean(-2, keepdim=True)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    if size == "test":
        shapes: list[tuple[int, ...]] = [(3, width) for width in WIDTHS]
        shapes += [(31, 17), (32, 5), (33, 40), (100, 9), (2, 3, 65, 7), (4, 1, 33)]
        shapes += [(4, 0), (0, 3, 4)]
    else:
        total, width = (MEBI // 4, 768) if size == "cache" else (256 * MEBI, 4096)
        shapes = [rows_of_bytes(total, width, dtype)]
    for shape in shapes:
        yield Sample(shape_name(shape), (values(*shape, dtype=dtype),))


def cost(x: Tensor) -> Cost:
    """Every element read once; a multiplication and two additions each."""
    matrices = x.shape[:-2].numel()
    means = matrices * (x.shape[-2] + x.shape[-1])
    return Cost(x.nbytes + 4 * means, 3 * x.numel())


op = register(mean_squares, samples, cost)
