"""Sums or means of rows of embedding tables whose rows are bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ...core.placement import empty_bytes
from .._binding import with_kernel
from .._op import Cost, Sample, nbytes, register
from .._quantized import NUMBERS
from .._samples import MEBI, values
from ..embedding_bag import bag_offsets

ROW_END = 8
"""Bytes behind those of a row: its scale and its least number, float32."""
STEPS = 255
"""Between the least and the largest number of a row."""
_AT_ONCE = 1 << 22
"""Numbers of a table that are rounded at once: they take several times as much memory meanwhile."""


def pack_rows(weight: Tensor) -> Tensor:
    """Rounds the rows of a table [rows, dim] to bytes: uint8 [rows, dim + 8].

    A number of a row is byte * scale + least: least is its least number, scale the difference to
    the largest one / 255. This is the format of torch's `quantized::embedding_bag_byte_prepack` and
    of FBGEMM's rowwise 8 bits. Scales are not finite where a number is not.
    """
    rows, dim = weight.shape
    packed = empty_bytes(rows * (dim + ROW_END)).view(rows, dim + ROW_END)
    step = max(1, _AT_ONCE // dim)
    for begin in range(0, rows, step):
        numbers = weight[begin : begin + step].float()
        least, largest = numbers.aminmax(dim=1, keepdim=True)
        scale = (largest - least) / STEPS
        whole = scale.clamp_min(torch.finfo(torch.float32).tiny)
        into = packed[begin : begin + step]
        into[:, :dim] = ((numbers - least) / whole).round().clamp(0, STEPS)
        into[:, dim:] = torch.cat([scale, least], 1).view(torch.uint8)
    return packed


def unpack_rows(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers of such rows, [rows, dim], computed in float32 or float64."""
    wide = torch.promote_types(dtype, torch.float32)
    ends = packed[:, -ROW_END:].contiguous().view(torch.float32).to(wide)
    return (packed[:, :-ROW_END].to(wide) * ends[:, :1] + ends[:, 1:]).to(dtype)


@with_kernel
def quantized_embedding_bag(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    mode: str = "sum",
    per_sample_weights: Sequence[Tensor] | None = None,
    include_last_offset: bool = False,
    out_dtype: str = "float32",
) -> Tensor:
    """Looks up one embedding bag per table of bytes and joins the results: [bags, tables * dim].

    weights: tables uint8 [rows, dim + 8] of `pack_rows`; rows may differ in number. indices: one
    tensor per table, all [n] with offsets, or all [bags, length] without; int32 or int64, the same
    in all. offsets: none, or one tensor per table as in `embedding_bag`, equally many bags in each.
    mode: "sum" or "mean". per_sample_weights: float32 in the shapes of indices; "sum" only.
    out_dtype: "float32", "bfloat16" or "float16". An empty bag is 0. Accumulates in float32, rounds
    once. There is no gradient. Other devices run plain PyTorch.
    Raises RuntimeError if a shape, dtype, device, mode, index or offset does not fit.
    """
    found = []
    for number, (weight, index) in enumerate(zip(weights, indices, strict=True)):
        scales = None if per_sample_weights is None else per_sample_weights[number].double()
        numbers = unpack_rows(weight[index.flatten()], torch.float64)
        places = torch.arange(index.numel(), device=index.device).view(index.shape)
        bags = functional.embedding_bag(
            places,
            numbers,
            offsets[number].long() if offsets else None,
            mode=mode,
            per_sample_weights=scales,
            include_last_offset=include_last_offset,
        )
        found.append(bags)
    return torch.cat(found, 1).to(NUMBERS[out_dtype])


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    name = {"out_dtype": str(dtype).removeprefix("torch.")}
    if size != "test":
        tables, dim, length = 26, 128, 10
        rows = (MEBI // 2 if size == "cache" else 1024 * MEBI) // tables // (dim + ROW_END)
        bags = (MEBI // 4 if size == "cache" else 160 * MEBI) // tables // length // (dim + ROW_END)
        weights = [pack_rows(torch.full((rows, dim), 0.5)) for _ in range(tables)]
        indices = [torch.randint(0, rows, (bags * length,)) for _ in range(tables)]
        begins = torch.arange(0, bags * length, length)
        yield Sample(f"{tables}x{rows}x{dim}", (weights, indices, [begins] * tables), name)
        return
    for dim in (1, 3, 8, 16, 17, 33, 64, 128, 200):
        weights = [pack_rows(torch.randn(rows, dim)) for rows in (5, 50)]
        indices = [torch.randint(0, rows, (20,)) for rows in (5, 50)]
        offsets = [bag_offsets(20, 7) for _ in range(2)]
        yield Sample(f"2x{dim}", (weights, indices, offsets), name)
    weights = [pack_rows(torch.randn(50, 40))]
    indices, offsets = [torch.randint(0, 50, (30,))], [bag_offsets(30, 9)]
    yield Sample("50x40-mean", (weights, indices, offsets, "mean"), name)
    narrow = [[each.int() for each in given] for given in (indices, offsets)]
    yield Sample("50x40-int32", (weights, *narrow), name)
    scales = [values(30, dtype=torch.float32)]
    yield Sample("50x40-weighted", (weights, indices, offsets, "sum", scales), name)
    ends = [torch.cat((offsets[0], torch.tensor([30])))]
    yield Sample("50x40-last_offset", (weights, indices, ends, "mean", None, True), name)
    yield Sample("50x40-two_dimensional", (weights, [indices[0].view(6, 5)], []), name)
    yield Sample("50x40-no_bag", (weights, [indices[0][:0]], [offsets[0][:0]]), name)


def cost(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    include_last_offset: bool,
    out_dtype: str,
    **rest: object,
) -> Cost:
    """Reads a row per index, the indices and the offsets, writes a row per bag and table."""
    columns = weights[0].shape[1]
    count = sum(each.numel() for each in indices)
    bags = offsets[0].numel() - include_last_offset if offsets else indices[0].shape[0]
    written = bags * len(weights) * (columns - ROW_END) * NUMBERS[out_dtype].itemsize
    moved = count * columns + nbytes((indices, offsets, rest)) + written
    return Cost(moved, 2 * count * columns)


op = register(quantized_embedding_bag, samples, cost, has_gradient=False)
