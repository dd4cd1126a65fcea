"""Softmax over the last dimension, with the scale and mask of attention scores."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._binding import with_kernel
from .._op import Cost, Sample, nbytes, register
from .._samples import MEBI, WIDTHS, rows_of_bytes, shape_name, values


@with_kernel
def softmax(x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Returns softmax(x * scale + mask) over the last dimension.

    x: [..., n], float32, bfloat16 or float16.
    mask: broadcasts to x's shape; bool (True keeps an element, False stands for minus infinity), or
        added, of the dtype of x or float32.

    Returns a new contiguous tensor of x's shape and dtype. Computes in float32, rounds once. A row
    of which nothing is kept is NaN, as in PyTorch. float64 and other devices run plain PyTorch.
    Raises RuntimeError if a shape, dtype or device does not fit.
    """
    scores = x if scale == 1.0 else x * scale
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1).to(x.dtype).contiguous()


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    shape: tuple[int, ...]
    if size == "cache":
        shape = (8, rows_of_bytes(MEBI // 4, 1024, dtype)[0], 128)
        yield Sample(shape_name(shape), (values(*shape, dtype=dtype), 0.125))
    elif size == "memory":
        shape = (12, rows_of_bytes(160 * MEBI, 12 * 1024, dtype)[0], 1024)
        yield Sample(shape_name(shape), (values(*shape, dtype=dtype), 0.125))
    else:
        for shape in [*((3, width) for width in WIDTHS), (0, 8), (2, 0), (2, 9000)]:
            yield Sample(shape_name(shape), (values(*shape, dtype=dtype) * 3,))
        x = values(2, 3, 5, 33, dtype=dtype) * 3
        added = values(2, 1, 5, 33, dtype=dtype)
        kept = torch.rand(2, 1, 5, 33, device="cpu") > 0.4
        kept[..., 0] = True
        causal = torch.full((5, 33), float("-inf"), device="cpu").triu(29)
        yield Sample("2x3x5x33-scaled", (x, 0.3))
        yield Sample("2x3x5x33-added", (x, 0.3, added))
        yield Sample("2x3x5x33-added_wide", (x, 0.3, added.float()))
        yield Sample("2x3x5x33-kept", (x, 0.3, kept))
        yield Sample("2x3x5x33-causal", (x, 1.0, causal.to(dtype)))
        yield Sample("2x3x5x33-per_row", (x, 1.0, values(3, 5, 1, dtype=dtype)))
        yield Sample("2x3x5x33-kept_keys", (x, 1.0, kept[:, :, :1]))
        yield Sample("2x3x5x33-strided_mask", (x, 1.0, values(33, 5, dtype=dtype).t()))
        nothing = kept.clone()
        nothing[0, 0, 2] = False
        yield Sample("2x3x5x33-nothing_kept", (x, 1.0, nothing))
        yield Sample("2x3x5x33-scalar_mask", (x, 2.0, torch.tensor(0.5, device="cpu")))


def cost(x: Tensor, **rest: object) -> Cost:
    """Reads x and mask, writes the result."""
    return Cost(2 * x.nbytes + nbytes(rest), 18 * x.numel())


op = register(softmax, samples, cost)
