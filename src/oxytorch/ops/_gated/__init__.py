"""What the gated activations share in Python: their sample calls."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._samples import MEBI, WIDTHS, rows_of_bytes, shape_name, values


def pairs(dtype: torch.dtype, size: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, gate and up of sample calls; also halves of one joined tensor, as models have them."""
    if size == "cache":
        shapes: list[tuple[int, ...]] = [rows_of_bytes(MEBI // 6, 1408, dtype)]
    elif size == "memory":
        shapes = [rows_of_bytes(320 * MEBI // 3, 11008, dtype)]
    else:
        shapes = [*((3, width) for width in WIDTHS), (0, 8), (2, 0), (3000,)]
    for shape in shapes:
        yield shape_name(shape), values(*shape, dtype=dtype) * 3, values(*shape, dtype=dtype)
    if size == "test":
        joined = values(5, 2 * 33, dtype=dtype)
        gate, up = joined.chunk(2, dim=-1)
        yield "5x33-joined", gate, up
        yield "4x3-transposed", values(3, 4, dtype=dtype).t(), values(3, 4, dtype=dtype).t()
        steep = torch.linspace(-14, 14, 200, dtype=torch.float32, device="cpu").to(dtype)
        yield "200-steep", steep, torch.ones(200, dtype=dtype, device="cpu")
