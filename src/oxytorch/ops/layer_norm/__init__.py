"""Layer normalization over the last dimension."""

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
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Gives each row of x mean 0 and variance 1: (x - mean) / sqrt(variance + eps) * weight + bias.

    x: [..., n], float32, bfloat16 or float16.
    weight, bias: [n], both the dtype of x or float32.

    Returns a new contiguous tensor of x's shape and dtype. Accumulates in float32 (from values less
    the mean of the first ones, which loses no digits where the mean is large), rounds once. float64
    and other devices run plain PyTorch.
    Raises RuntimeError if a shape, dtype or device does not fit. Source: Ba, Kiros and Hinton,
    Layer Normalization, 2016, equations 3 and 4.
    """
    given = [tensor for tensor in (weight, bias) if tensor is not None]
    if all(tensor.dtype == x.dtype for tensor in given):
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps).contiguous()
    wide = functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps)
    return wide.to(x.dtype).contiguous()


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    for shape in _norm.shapes(dtype, size, tensors=2):
        x, weight, bias = (values(*s, dtype=dtype) for s in (shape, shape[-1:], shape[-1:]))
        yield Sample(shape_name(shape), (x, weight, bias))
    if size == "test":
        x, bias = values(3, 33, dtype=dtype), values(33, dtype=dtype)
        yield Sample("3x33-plain", (x,))
        yield Sample("3x33-no_weight", (x, None, bias))
        yield Sample(
            "3x33-wide_weight",
            (x, torch.randn(33, device="cpu"), torch.randn(33, device="cpu")),
            {"eps": 0.5},
        )
        # The mean is far larger than the spread: a variance from squares alone would be lost.
        yield Sample("3x100-far_mean", (values(3, 100, dtype=dtype) + 100, None, None))


def cost(x: Tensor, **rest: object) -> Cost:
    """Reads x, weight and bias, writes the result."""
    return Cost(2 * x.nbytes + nbytes(rest), 7 * x.numel())


op = register(layer_norm, samples, cost)
