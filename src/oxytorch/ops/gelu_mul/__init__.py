"""Gated GELU activation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from .. import _gated
from .._autocast import Autocast
from .._binding import with_kernel
from .._op import Cost, Sample, nbytes, register


@with_kernel
def gelu_mul(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """Returns gelu(gate) * up with gelu(v) = v P(Z < v) for a standard normal Z.

    gate, up: any shape, float32, bfloat16 or float16, alike in both; rows may be strided, so the
    two halves of one joined tensor need no copy.
    approximate: "none", or "tanh" for v (1 + tanh(sqrt(2 / pi) (v + 0.044715 v^3))) / 2.
    Returns a new contiguous tensor of their shape and dtype. Computes in float32, rounds once; far
    to the left it keeps more digits than 1 + erf does.
    float64 and other devices run plain PyTorch.
    Raises RuntimeError if a shape, dtype, device or `approximate` does not fit.
    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016; Shazeer, GLU Variants Improve
    Transformer, 2020, equation 5 (GEGLU).
    """
    return (functional.gelu(gate, approximate=approximate) * up).contiguous()


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    for name, gate, up in _gated.pairs(dtype, size):
        yield Sample(name, (gate, up))
        if size == "test":
            yield Sample(name + "-tanh", (gate, up), {"approximate": "tanh"})


def cost(gate: Tensor, **rest: object) -> Cost:
    """Reads gate and up, writes the result."""
    return Cost(2 * gate.nbytes + nbytes(rest), 35 * gate.numel())


op = register(gelu_mul, samples, cost, autocast=Autocast("widest", ("gate", "up")))
