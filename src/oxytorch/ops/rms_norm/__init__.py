"""Root-mean-square normalization over the last dimension."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .._binding import entry
from .._op import Cost, Op, Sample, register


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Divides each row of x by its root mean square: x / sqrt(mean(x^2) + eps) * weight.

    x: [..., n], float32, bfloat16 or float16. weight: [n], the dtype of x or float32.
    Returns a new contiguous tensor of x's shape and dtype. Accumulates in float32, rounds once.
    Raises RuntimeError if a shape, dtype or device does not fit.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, equation 4.
    """
    result: Tensor = _kernel(x, weight, eps)
    return result


def reference(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """The same in plain PyTorch."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight
    return normed.to(x.dtype).contiguous()


def samples(dtype: torch.dtype, size: str) -> Iterable[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    shapes = {
        "test": [(1, 1), (3, 7), (5, 64), (2, 3, 100), (0, 8), (7, 1037)],
        "cache": [(64, 1024)],
        "memory": [(128 << 20 >> 12 >> (dtype.itemsize // 2), 4096)],
    }[size]
    for shape in shapes:
        x = torch.randn(shape).to(dtype)
        weight = torch.randn(shape[-1]).to(dtype)
        yield Sample("x".join(map(str, shape)), (x, weight))
    if size == "test":
        yield Sample("3x33-no_weight", (torch.randn(3, 33).to(dtype),))
        yield Sample("3x33-eps", (torch.randn(3, 33).to(dtype), torch.randn(33)), {"eps": 0.5})


def cost(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Cost:
    """Reads x and weight, writes the result."""
    weight_bytes = 0 if weight is None else weight.nbytes
    return Cost(bytes=2 * x.nbytes + weight_bytes, operations=4 * x.numel())


_kernel = entry("rms_norm", reference)

op = register(Op(function=rms_norm, reference=reference, samples=samples, cost=cost))
