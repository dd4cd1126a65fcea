"""The smallest complete op, to copy from: multiplication by a number.

CONTRIBUTING.md says what to do with the copy. This folder is built and tested like every op, but it
is not part of the wheel, and `oxytorch.ops` does not import it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._binding import with_kernel
from .._op import Cost, Sample, register
from .._samples import MEBI, WIDTHS, rows_of_bytes, shape_name, values


@with_kernel
def scale(x: Tensor, factor: float = 2.0) -> Tensor:
    """Returns x * factor.

    x: [..., n], float32, bfloat16 or float16. Returns a new contiguous tensor of x's shape and
    dtype. Computes in float32, rounds once. float64 and other devices run plain PyTorch.
    Raises RuntimeError if the dtype does not fit.
    """
    return (x * factor).contiguous()


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    shapes: list[tuple[int, ...]] = [(3, width) for width in WIDTHS]
    if size == "cache":
        shapes = [rows_of_bytes(MEBI // 4, 768, dtype)]
    elif size == "memory":
        shapes = [rows_of_bytes(160 * MEBI, 4096, dtype)]
    for shape in shapes:
        yield Sample(shape_name(shape), (values(*shape, dtype=dtype), 0.3))


def cost(x: Tensor, **rest: object) -> Cost:
    """Reads x, writes the result."""
    return Cost(2 * x.nbytes, x.numel())


op = register(scale, samples, cost)
