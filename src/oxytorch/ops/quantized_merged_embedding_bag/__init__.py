"""Embedding bags over many tables of bytes in one sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._binding import with_kernel
from .._op import Cost, Sample, register
from .._samples import MEBI
from ..embedding_bag import bag_offsets
from ..quantized_embedding_bag import ROW_END, pack_rows
from ..quantized_embedding_bag import op as one_table


@with_kernel
def quantized_merged_embedding_bag(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    mode: str = "sum",
    out_dtype: str = "float32",
) -> Tensor:
    """Looks up one embedding bag per table of bytes and joins the results: [bags, tables * dim].

    weights: tables uint8 [rows, dim + 8] of `quantized_embedding_bag.pack_rows`, rows may differ.
    indices, offsets: one tensor each per table as in `embedding_bag`, int32 or int64, equally many
        bags in each.
    mode: "sum" or "mean".
    out_dtype: "float32", "bfloat16" or "float16". Accumulates in float32, rounds once. There is no
        gradient. Other devices run plain PyTorch.

    Raises RuntimeError if a shape, dtype, device, mode, index or offset does not fit.
    """
    tables = zip(weights, indices, offsets, strict=True)
    bags = [one_table.reference(*table, mode, out_dtype=out_dtype) for table in tables]
    return torch.cat(bags, dim=1)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    name: dict[str, object] = {"out_dtype": str(dtype).removeprefix("torch.")}
    if size != "test":
        tables, dim, length = 26, 128, 10
        rows = (MEBI // 2 if size == "cache" else 1024 * MEBI) // tables // (dim + ROW_END)
        bags = (MEBI // 4 if size == "cache" else 160 * MEBI) // tables // length // (dim + ROW_END)
        weights = [pack_rows(torch.full((rows, dim), 0.5, device="cpu")) for _ in range(tables)]
        indices = [torch.randint(0, rows, (bags * length,), device="cpu") for _ in range(tables)]
        begins = torch.arange(0, bags * length, length, device="cpu")
        yield Sample(f"{tables}x{rows}x{dim}", (weights, indices, [begins] * tables), name)
        return
    for dim in (1, 8, 16, 17, 33, 128):
        weights = [pack_rows(torch.randn(rows, dim, device="cpu")) for rows in (5, 50, 9)]
        indices = [torch.randint(0, rows, (20,), device="cpu") for rows in (5, 50, 9)]
        offsets = [bag_offsets(20, 7) for _ in range(3)]
        yield Sample(f"3x{dim}", (weights, indices, offsets), name)
    yield Sample("3x128-mean", (weights, indices, offsets, "mean"), name)
    narrow = [tensor.int() for tensor in indices]
    yield Sample("3x128-int32", (weights, narrow, [tensor.int() for tensor in offsets]), name)
    yield Sample("1x128", (weights[:1], indices[:1], offsets[:1]), name)
    none = [tensor[:0] for tensor in indices]
    yield Sample("3x128-no_bag", (weights, none, none), name)


def cost(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    out_dtype: str,
    **rest: object,
) -> Cost:
    """The cost of all tables together."""
    tables = zip(weights, indices, offsets, strict=True)
    costs = [one_table.cost(*table, out_dtype=out_dtype) for table in tables]
    return Cost(sum(each.bytes for each in costs), sum(each.operations for each in costs))


op = register(quantized_merged_embedding_bag, samples, cost, has_gradient=False)
