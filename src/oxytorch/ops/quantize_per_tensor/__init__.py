"""Numbers to bytes with one scale and zero point."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._binding import with_kernel
from .._op import Cost, Sample, register
from .._quantized import NUMBERS, to_bytes
from .._samples import MEBI, WIDTHS, rows_of_bytes, shape_name, values


@with_kernel
def quantize_per_tensor(x: Tensor, scale: float, zero_point: int, dtype: str) -> Tensor:
    """Returns round(x / scale) + zero_point, clamped to the dtype.

    x: float32, bfloat16 or float16.
    dtype: "int8" or "uint8". The quotient is the float32 product with 1 / scale, rounded to the
        nearest, ties to even; NaN becomes the least byte.

    Returns a tensor of x's shape, in its order if that is dense. There is no gradient. float64 and
    other devices run plain PyTorch.
    Raises RuntimeError if a dtype, the scale or the zero point does not fit.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return to_bytes(x.to(wide), scale, zero_point, NUMBERS[dtype])


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    shapes: list[tuple[int, ...]]
    if size != "test":
        total = MEBI // 4 if size == "cache" else 160 * MEBI
        shapes = [rows_of_bytes(total, 4096, dtype)]
    else:
        shapes = [(3, width) for width in WIDTHS] + [(2, 5, 7, 6), (0, 4)]
    for index, shape in enumerate(shapes):
        x = values(*shape, dtype=dtype)
        rest = (1 / 32, 3, "int8") if index % 2 else (0.023, 120, "uint8")
        yield Sample(f"{shape_name(shape)}-{rest[2]}", (x, *rest))
    if size == "test":
        special = torch.tensor(
            [float("nan"), float("inf"), -float("inf"), 0.5, 1.5, 2.5, -0.5], device="cpu"
        )
        yield Sample("special", (special.to(dtype), 1.0, 3, "int8"))


def cost(x: Tensor, **rest: object) -> Cost:
    """Reads x, writes bytes."""
    return Cost(x.nbytes + x.numel(), 4 * x.numel())


op = register(quantize_per_tensor, samples, cost, has_gradient=False)
