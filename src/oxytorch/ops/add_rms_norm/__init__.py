"""Residual sum and root-mean-square normalization in one sweep."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import _norm
from .._autocast import Autocast
from .._binding import with_kernel
from .._op import Cost, Sample, nbytes, register
from .._samples import shape_name, values
from ..rms_norm import op as norm


@_norm.total_if_asked
@with_kernel
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    return_total: bool = True,
) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(total, weight, eps), total) with total = x + residual, or only the norm.

    x, residual: [..., n], float32, bfloat16 or float16.
    weight: [n], the dtype of x or float32. The total is rounded to x's dtype and the norm is that
        of the rounded total, so the result equals that of the two steps. With return_total=False
        the total is not written to memory. New contiguous tensors of x's shape and dtype.
        Accumulates in float32. float64 and other devices run plain PyTorch.

    Raises RuntimeError if a shape, dtype or device does not fit.
    """
    total = (x + residual).contiguous()
    normed = norm.reference(total, weight, eps)
    return normed, total if return_total else x.new_empty(0)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    for shape in _norm.shapes(dtype, size, tensors=4):
        x, residual, weight = (values(*s, dtype=dtype) for s in (shape, shape, shape[-1:]))
        yield Sample(shape_name(shape), (x, residual, weight))
        if size == "test":
            yield Sample(
                shape_name(shape) + "-no_total", (x, residual, weight), {"return_total": False}
            )
    if size == "test":
        x, residual = values(3, 33, dtype=dtype), values(3, 33, dtype=dtype)
        yield Sample("3x33-no_weight", (x, residual))
        yield Sample("3x33-wide_weight", (x, residual, torch.randn(33, device="cpu")), {"eps": 0.5})


def cost(x: Tensor, return_total: bool, **rest: object) -> Cost:
    """Reads x, residual and the rest, writes the norm and perhaps the total."""
    moved = (3 if return_total else 2) * x.nbytes + nbytes(rest)
    return Cost(moved, 5 * x.numel())


op = register(
    _norm.with_total(add_rms_norm), samples, cost, autocast=Autocast("widest", ("x", "residual"))
)
