"""Pieces from which ops build their sample calls."""

from __future__ import annotations

import torch
from torch import Tensor

# Row widths around every vector length, and one that no power of two divides.
WIDTHS = (1, 3, 8, 15, 16, 17, 32, 33, 64, 100, 1037)

MEBI = 1 << 20


def values(*shape: int, dtype: torch.dtype) -> Tensor:
    """Standard normal values, drawn in float32 so that every dtype sees the same ones."""
    return torch.randn(shape, device="cpu").to(dtype)


def rows_of_bytes(total: int, width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Shape of a matrix of `width` columns that takes about `total` bytes."""
    return max(1, total // (width * dtype.itemsize)), width


def shape_name(shape: tuple[int, ...]) -> str:
    """A shape as tests and tables write it: 3x7."""
    return "x".join(map(str, shape)) or "scalar"
