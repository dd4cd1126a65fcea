"""Pairwise dot products of feature vectors, the interaction of recommendation models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._autocast import Autocast
from .._binding import with_kernel
from .._op import Cost, Sample, register
from .._samples import MEBI, values


@with_kernel
def interaction(dense: Tensor, sparse: Sequence[Tensor]) -> Tensor:
    """Joins the dense features with the dot products of all pairs of feature vectors.

    dense: [batch, dim], float32, bfloat16 or float16.
    sparse: T tensors alike, one per embedding.

    Returns [batch, dim + T (T + 1) / 2]: dense, then the strictly lower triangle of the Gram matrix
    of (dense, sparse[0], ...), row by row. Accumulates in float32, rounds once. float64 and other
    devices run plain PyTorch.
    Raises RuntimeError if a shape, dtype or device does not fit. Source: Naumov et al., Deep
    Learning Recommendation Model for Personalization and Recommendation Systems, 2019, section
    2.1.3.
    """
    features = torch.stack((dense, *sparse), dim=1)
    products = torch.bmm(features, features.transpose(1, 2))
    count = features.shape[1]
    row, column = torch.tril_indices(count, count, offset=-1, device=dense.device)
    return torch.cat((dense, products[:, row, column]), dim=1)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    if size != "test":
        count, dim = 27, 128
        batch = (MEBI // 2 if size == "cache" else 320 * MEBI) // (count * dim * dtype.itemsize)
        dense, *sparse = (values(batch, dim, dtype=dtype) for _ in range(count))
        yield Sample(f"{batch}x{count}x{dim}", (dense, sparse))
        return
    for count, dim in ((1, 16), (2, 1), (4, 33), (5, 32), (9, 64), (27, 128), (28, 15), (3, 0)):
        dense, *sparse = (values(3, dim, dtype=dtype) for _ in range(count))
        yield Sample(f"3x{count}x{dim}", (dense, sparse))
    joined = values(3, 4, 40, dtype=dtype)
    yield Sample("3x4x40-slices", (joined[:, 0], list(joined[:, 1:].unbind(1))))
    yield Sample("0x4x40", (joined[:0, 0], list(joined[:0, 1:].unbind(1))))
    columns = values(40, 3, dtype=dtype)
    yield Sample("3x2x40-transposed", (columns.t(), [columns.t()]))


def cost(dense: Tensor, sparse: Sequence[Tensor]) -> Cost:
    """Reads every feature once, writes the result."""
    count = len(sparse) + 1
    pairs = count * (count - 1) // 2
    batch, dim = dense.shape
    moved = batch * (count * dim + dim + pairs) * dense.dtype.itemsize
    return Cost(moved, 2 * batch * pairs * dim)


op = register(interaction, samples, cost, autocast=Autocast("widest", ("dense", "sparse")))
