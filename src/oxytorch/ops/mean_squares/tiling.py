"""How the sweeps over matrices are split among programs of a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

SMALL = 1024
"""Elements up to which matrices are done many at a time."""

LANES = 256
"""Rows, columns or matrices of a program, where matrices are small."""

STRIP, STRIPE = 32, 128
"""Rows and columns of a tile of a matrix that is not small."""


def _up(count: int, size: int) -> int:
    return -(-count // size)


def _table(tiles: Iterable[int]) -> Tensor:
    counts = torch.tensor(list(tiles), dtype=torch.int64, device="cpu")
    tensor = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
    first = torch.cumsum(counts, 0) - counts
    return torch.stack([tensor, torch.arange(len(tensor), device="cpu") - first[tensor]], 1).int()


def _matrices(shape: Sequence[int]) -> int:
    return int(torch.Size(shape[:-2]).numel())


def strip_count(shape: Sequence[int]) -> int:
    """Strips of all matrices of a tensor; each needs a row of float32 sums as wide as a matrix."""
    height, width = shape[-2:]
    return _matrices(shape) * _up(height, STRIP) if height * width > SMALL else 0


def sum_tiles(shapes: Sequence[Sequence[int]]) -> Tensor:
    """The tiles of `factor_sums`, int32 [number, 2], for tensors of these shapes."""

    def count(shape: Sequence[int]) -> int:
        height, width = shape[-2:]
        matrices = _matrices(shape)
        if height * width > SMALL:
            return strip_count(shape)
        return _up(matrices * height, LANES) + _up(matrices * width, LANES)

    return _table(count(shape) if 0 not in shape else 0 for shape in shapes)


def factor_tiles(shapes: Sequence[Sequence[int]]) -> Tensor:
    """The tiles of `factors`, int32 [number, 2], for tensors of these shapes."""

    def count(shape: Sequence[int]) -> int:
        height, width = shape[-2:]
        matrices = _matrices(shape)
        if height * width > SMALL:
            return matrices * (1 + _up(width, STRIPE))
        return _up(matrices, LANES)

    return _table(count(shape) if 0 not in shape else 0 for shape in shapes)
