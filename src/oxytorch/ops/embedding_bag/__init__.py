"""Sums or means of rows of an embedding table."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from .._binding import with_kernel
from .._op import Cost, Sample, nbytes, register
from .._samples import MEBI, values


@with_kernel
def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None = None,
    mode: str = "sum",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
) -> Tensor:
    """Sums (or averages) the rows of a table whose indices lie in one bag, for every bag.

    weight: [rows, dim], float32, bfloat16 or float16.
    indices: [n] with offsets, or [bags, length], int32 or int64.
    offsets: [bags], int32 or int64, where each bag begins in indices, ascending from 0; with
        include_last_offset [bags + 1], the last being the end of the last bag.
    mode: "sum" or "mean".
    per_sample_weights: shape of indices, dtype of weight; "sum" only.

    Returns [bags, dim] of weight's dtype; an empty bag is 0. Accumulates in float32, rounds once.
    float64 and other devices run plain PyTorch.
    Raises RuntimeError if a shape, dtype, device, mode, index or offset does not fit.
    """
    if offsets is not None and offsets.dtype != indices.dtype:
        offsets = offsets.to(indices.dtype)
    return functional.embedding_bag(
        indices,
        weight,
        offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
    )


def bag_offsets(count: int, bags: int) -> Tensor:
    """Offsets of bags of unequal length, some of them empty, over `count` indices."""
    inner = torch.randint(0, count + 1, (max(bags - 1, 0),), device="cpu").sort().values
    return torch.cat((torch.zeros(min(bags, 1), dtype=torch.int64, device="cpu"), inner))


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    if size != "test":
        dim, length = 128, 20
        row_bytes = dim * dtype.itemsize
        # In memory, few of the table's rows are read twice.
        rows, reads = (
            (MEBI // 4 // row_bytes, MEBI // 2 // row_bytes)
            if size == "cache"
            else (1024 * MEBI // row_bytes, 320 * MEBI // row_bytes)
        )
        weight = torch.empty(rows, dim, dtype=dtype, device="cpu").fill_(0.5)
        indices = torch.randint(0, rows, (reads // length * length,), device="cpu")
        offsets = torch.arange(0, indices.numel(), length, device="cpu")
        yield Sample(f"{rows}x{dim}-{length}", (weight, indices, offsets))
        return
    for dim in (1, 3, 8, 16, 17, 33, 64, 128, 200):
        indices = torch.randint(0, 50, (30,), device="cpu")
        yield Sample(f"50x{dim}", (values(50, dim, dtype=dtype), indices, bag_offsets(30, 9)))
    weight = values(50, 40, dtype=dtype)
    indices, offsets = torch.randint(0, 50, (30,), device="cpu"), bag_offsets(30, 9)
    yield Sample("50x40-mean", (weight, indices, offsets, "mean"))
    yield Sample("50x40-int32", (weight, indices.int(), offsets.int()))
    scales = values(30, dtype=dtype)
    yield Sample("50x40-weighted", (weight, indices, offsets, "sum", scales))
    ends = torch.cat((offsets, torch.tensor([30], device="cpu")))
    yield Sample("50x40-last_offset", (weight, indices, ends, "mean", None, True))
    yield Sample("50x40-two_dimensional", (weight, indices.view(6, 5)))
    yield Sample("50x40-strided_rows", (values(50, 80, dtype=dtype)[:, :40], indices, offsets))
    yield Sample("50x40-no_bag", (weight, indices[:0], offsets[:0]))
    yield Sample(
        "50x40-empty_bags", (weight, indices[:0], torch.zeros(3, dtype=torch.int64, device="cpu"))
    )


def cost(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    include_last_offset: bool,
    **rest: object,
) -> Cost:
    """Reads a row per index, the indices and the offsets, writes a row per bag."""
    row = weight.shape[1] * weight.dtype.itemsize
    bags = indices.shape[0] if offsets is None else offsets.numel() - include_last_offset
    numbers = nbytes((indices, offsets, rest))
    return Cost((indices.numel() + bags) * row + numbers, indices.numel() * weight.shape[1])


op = register(embedding_bag, samples, cost)
