"""Residual sum and layer normalization in one sweep."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import _norm
from .._autocast import Autocast
from .._binding import with_kernel
from .._op import Cost, Sample, nbytes, register
from .._samples import shape_name, values
from ..layer_norm import op as norm


@_norm.total_if_asked
@with_kernel
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    return_total: bool = True,
) -> tuple[Tensor, Tensor]:
    """Returns (layer_norm(total, weight, bias, eps), total), total = x + residual, or the norm.

    x, residual: [..., n], float32, bfloat16 or float16.
    weight, bias: [n], both the dtype of x or float32. The total is rounded to x's dtype and the
        norm is that of the rounded total, so the result equals that of the two steps. With
        return_total=False (models that normalize after the sum, such as BERT) the total is not
        written to memory. New contiguous tensors of x's shape and dtype. Accumulates in float32.
        float64 and other devices run plain PyTorch.

    Raises RuntimeError if a shape, dtype or device does not fit.
    """
    total = (x + residual).contiguous()
    normed = norm.reference(total, weight, bias, eps)
    return normed, total if return_total else x.new_empty(0)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    for shape in _norm.shapes(dtype, size, tensors=4):
        x, residual = values(*shape, dtype=dtype), values(*shape, dtype=dtype)
        weight, bias = values(*shape[-1:], dtype=dtype), values(*shape[-1:], dtype=dtype)
        yield Sample(shape_name(shape), (x, residual, weight, bias))
        if size == "test":
            yield Sample(
                shape_name(shape) + "-no_total",
                (x, residual, weight, bias),
                {"return_total": False},
            )
    if size == "test":
        x, residual = values(3, 33, dtype=dtype), values(3, 33, dtype=dtype)
        yield Sample("3x33-plain", (x, residual))
        wide = (torch.randn(33, device="cpu"), torch.randn(33, device="cpu"))
        yield Sample("3x33-wide_weight", (x, residual, *wide), {"eps": 0.5})


def cost(x: Tensor, return_total: bool, **rest: object) -> Cost:
    """Reads x, residual and the rest, writes the norm and perhaps the total."""
    moved = (3 if return_total else 2) * x.nbytes + nbytes(rest)
    return Cost(moved, 8 * x.numel())


op = register(
    _norm.with_total(add_layer_norm), samples, cost, autocast=Autocast("widest", ("x", "residual"))
)
