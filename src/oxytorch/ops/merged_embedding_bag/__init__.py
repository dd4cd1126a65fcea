"""Embedding bags over many tables in one sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._autocast import Autocast
from .._binding import with_kernel
from .._op import Cost, Sample, register
from .._samples import MEBI, values
from ..embedding_bag import bag_offsets
from ..embedding_bag import op as one_table


@with_kernel
def merged_embedding_bag(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    mode: str = "sum",
) -> Tensor:
    """Looks up one embedding bag per table and joins the results: [bags, tables * dim].

    weights: tables of [rows, dim], rows may differ, float32, bfloat16 or float16.
    indices, offsets: one tensor each per table as in `embedding_bag`, int32 or int64, equally many
        bags in each.
    mode: "sum" or "mean". Accumulates in float32, rounds once to the weights' dtype. float64 and
        other devices run plain PyTorch.

    Raises RuntimeError if a shape, dtype, device, mode, index or offset does not fit.
    """
    tables = zip(weights, indices, offsets, strict=True)
    bags = [one_table.reference(*table, mode) for table in tables]
    return torch.cat(bags, dim=1)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    if size != "test":
        tables, dim = 26, 128
        row_bytes = dim * dtype.itemsize
        # One index per bag, as in the recommendation models of MLPerf.
        rows, bags = (
            (MEBI // 2 // tables // row_bytes, MEBI // 4 // tables // row_bytes)
            if size == "cache"
            else (1024 * MEBI // tables // row_bytes, 160 * MEBI // tables // row_bytes)
        )
        weights = [
            torch.empty(rows, dim, dtype=dtype, device="cpu").fill_(0.5) for _ in range(tables)
        ]
        indices = [torch.randint(0, rows, (bags,), device="cpu") for _ in range(tables)]
        yield Sample(
            f"{tables}x{rows}x{dim}",
            (weights, indices, [torch.arange(bags, device="cpu")] * tables),
        )
        return
    for dim in (1, 8, 16, 17, 33, 128):
        weights = [values(rows, dim, dtype=dtype) for rows in (5, 50, 9)]
        indices = [torch.randint(0, rows, (20,), device="cpu") for rows in (5, 50, 9)]
        offsets = [bag_offsets(20, 7) for _ in range(3)]
        yield Sample(f"3x{dim}", (weights, indices, offsets))
    yield Sample("3x128-mean", (weights, indices, offsets, "mean"))
    narrow = [tensor.int() for tensor in indices]
    yield Sample("3x128-int32", (weights, narrow, [tensor.int() for tensor in offsets]))
    yield Sample("1x128", (weights[:1], indices[:1], offsets[:1]))
    none = [tensor[:0] for tensor in indices]
    yield Sample("3x128-no_bag", (weights, none, none))


def cost(
    weights: Sequence[Tensor], indices: Sequence[Tensor], offsets: Sequence[Tensor], **rest: object
) -> Cost:
    """The cost of all tables together."""
    tables = [one_table.cost(*table) for table in zip(weights, indices, offsets, strict=True)]
    return Cost(sum(each.bytes for each in tables), sum(each.operations for each in tables))


op = register(merged_embedding_bag, samples, cost, autocast=Autocast("widest", ("weights",)))
