"""Bytes with one scale and zero point to numbers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._binding import with_kernel
from .._op import Cost, Sample, register
from .._quantized import NUMBERS, from_bytes, random_bytes
from .._samples import MEBI, WIDTHS, rows_of_bytes, shape_name


@with_kernel
def dequantize_per_tensor(x: Tensor, scale: float, zero_point: int, dtype: str) -> Tensor:
    """Returns (x - zero_point) * scale.

    x: int8 or uint8.
    dtype: "float32", "bfloat16" or "float16", to which the float32 product is rounded.

    Returns a tensor of x's shape, in its order if that is dense. There is no gradient. Other
    devices run plain PyTorch.
    Raises RuntimeError if a dtype, the scale or the zero point does not fit.
    """
    return from_bytes(x, scale, zero_point, torch.float32).to(NUMBERS[dtype])


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    shapes: list[tuple[int, ...]]
    if size != "test":
        shapes = [rows_of_bytes(MEBI // 8 if size == "cache" else 80 * MEBI, 4096, torch.int8)]
    else:
        shapes = [(3, width) for width in WIDTHS] + [(2, 5, 7, 6), (0, 4)]
    for index, shape in enumerate(shapes):
        kind, zero_point = ((torch.int8, -3), (torch.uint8, 120))[index % 2]
        x = random_bytes(*shape, dtype=kind)
        name = f"{shape_name(shape)}-{str(kind).removeprefix('torch.')}"
        yield Sample(name, (x, 0.023, zero_point, str(dtype).removeprefix("torch.")))


def cost(x: Tensor, dtype: str, **rest: object) -> Cost:
    """Reads bytes, writes numbers."""
    return Cost(x.nbytes + x.numel() * NUMBERS[dtype].itemsize, 2 * x.numel())


op = register(dequantize_per_tensor, samples, cost, has_gradient=False)
