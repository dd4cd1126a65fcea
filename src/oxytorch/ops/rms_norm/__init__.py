"""Root-mean-square normalization over the last dimension."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from .. import _norm
from .._binding import with_kernel
from .._op import Cost, Sample, nbytes, register
from .._samples import shape_name, values


@with_kernel
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Divides each row of x by its root mean square: x / sqrt(mean(x^2) + eps) * weight.

    x: [..., n], float32, bfloat16 or float16.
    weight: [n], the dtype of x or float32.

    Returns a new contiguous tensor of x's shape and dtype. Accumulates in float32, rounds once.
    float64 and other devices run plain PyTorch.
    Raises RuntimeError if a shape, dtype or device does not fit. Source: Zhang and Sennrich, Root
    Mean Square Layer Normalization, 2019, equation 4.
    """
    if weight is None or weight.dtype == x.dtype:
        return functional.rms_norm(x, x.shape[-1:], weight, eps).contiguous()
    return functional.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype).contiguous()


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    for shape in _norm.shapes(dtype, size, tensors=2):
        weight = values(*shape[-1:], dtype=dtype)
        yield Sample(shape_name(shape), (values(*shape, dtype=dtype), weight))
    if size == "test":
        x = values(3, 33, dtype=dtype)
        yield Sample("3x33-no_weight", (x,))
        yield Sample("3x33-wide_weight", (x, torch.randn(33, device="cpu")), {"eps": 0.5})


def cost(x: Tensor, **rest: object) -> Cost:
    """Reads x and weight, writes the result."""
    return Cost(2 * x.nbytes + nbytes(rest), 4 * x.numel())


op = register(rms_norm, samples, cost)
