"""The 2-norm of many tensors together, as gradient clipping needs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._binding import with_kernel
from .._op import Cost, Sample, register
from .._samples import MEBI, values


@with_kernel
def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The square root of the sum of the squares of all elements of all tensors, as one number.

    tensors: float32, bfloat16 or float16, of any shapes, dtypes mixed; none give 0. Returns float32
    [] (float64 if the first tensor is). Squares and sums are float64 and rounded once, so that
    nothing overflows on the way; the bits depend neither on the number of threads nor on the level.
    float64 and other devices run plain PyTorch.
    Raises RuntimeError if a dtype or device does not fit.
    """
    if not tensors:
        return torch.zeros((), device="cpu")
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total if tensors[0].dtype == torch.float64 else total.float()


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    if size != "test":
        count = (MEBI // 4 if size == "cache" else 256 * MEBI) // dtype.itemsize // 8
        yield Sample(f"8x{count}", ([values(count, dtype=dtype) for _ in range(8)],))
        return
    yield Sample("3_tensors", ([values(*shape, dtype=dtype) for shape in ((3, 7), (33,), (2, 2))],))
    for count in (1, 2, 15, 16, 17, 31, 32, 33, 4095, 4096, 4097, 9000):
        yield Sample(str(count), ([values(count, dtype=dtype)],))
    several = [values(rows, 65, dtype=dtype) for rows in (0, 63, 1, 0, 200, 5, 0)]
    yield Sample("7x65", (several,))
    yield Sample("huge", ([values(70, dtype=dtype) * torch.finfo(dtype).max ** 0.9],))


def cost(tensors: Sequence[Tensor]) -> Cost:
    """Every element read once; a multiplication and an addition each."""
    elements = sum(tensor.numel() for tensor in tensors)
    return Cost(sum(tensor.nbytes for tensor in tensors) + 4, 2 * elements)


op = register(global_norm, samples, cost)
