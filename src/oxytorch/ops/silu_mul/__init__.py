"""Gated SiLU activation."""

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
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up with silu(v) = v / (1 + exp(-v)).

    gate, up: any shape, float32, bfloat16 or float16, alike in both; rows may be strided, so the
    two halves of one joined tensor need no copy.
    Returns a new contiguous tensor of their shape and dtype. Computes in float32, rounds once.
    float64 and other devices run plain PyTorch.
    Raises RuntimeError if a shape, dtype or device does not fit.
    Source: Shazeer, GLU Variants Improve Transformer, 2020, equation 5 (SwiGLU).
    """
    return (functional.silu(gate) * up).contiguous()


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    for name, gate, up in _gated.pairs(dtype, size):
        yield Sample(name, (gate, up))


def cost(gate: Tensor, **rest: object) -> Cost:
    """Reads gate and up, writes the result."""
    return Cost(2 * gate.nbytes + nbytes(rest), 15 * gate.numel())


op = register(silu_mul, samples, cost, autocast=Autocast("widest", ("gate", "up")))
