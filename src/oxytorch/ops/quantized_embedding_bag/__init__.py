"""Sums or means of rows of an embedding table whose rows are bytes."""

from __future__ import annotations

from collections.abc import Iterator

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


def scales_of_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and least number [rows, 1] of each row of float32 numbers."""
    least, largest = rows.aminmax(dim=1, keepdim=True)
    return (largest - least) / STEPS, least


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
        scale, least = scales_of_rows(numbers)
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
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None = None,
    mode: str = "sum",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    out_dtype: str = "float32",
) -> Tensor:
    """Sums (or averages) the rows of a table of bytes whose indices lie in one bag, for every bag.

    weight: uint8 [rows, dim + 8] of `pack_rows`.
    indices: [n] with offsets, or [bags, length], int32 or int64.
    offsets, include_last_offset: as in `embedding_bag`.
    mode: "sum" or "mean".
    per_sample_weights: float32 in the shape of indices; "sum" only.
    out_dtype: "float32", "bfloat16" or "float16".

    Returns [bags, dim]; an empty bag is 0. Accumulates in float32, rounds once. There is no
    gradient. Other devices run plain PyTorch.
    Raises RuntimeError if a shape, dtype, device, mode, index or offset does not fit.
    """
    numbers = unpack_rows(weight[indices.flatten()], torch.float64)
    places = torch.arange(indices.numel(), device=indices.device).view(indices.shape)
    bags = functional.embedding_bag(
        places,
        numbers,
        None if offsets is None else offsets.long(),
        mode=mode,
        per_sample_weights=None if per_sample_weights is None else per_sample_weights.double(),
        include_last_offset=include_last_offset,
    )
    return bags.to(NUMBERS[out_dtype])


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    name: dict[str, object] = {"out_dtype": str(dtype).removeprefix("torch.")}
    if size != "test":
        dim, length = 128, 20
        rows = (MEBI // 4 if size == "cache" else 1024 * MEBI) // (dim + ROW_END)
        reads = (MEBI // 2 if size == "cache" else 160 * MEBI) // (dim + ROW_END)
        weight = pack_rows(torch.full((rows, dim), 0.5, device="cpu"))
        indices = torch.randint(0, rows, (reads // length * length,), device="cpu")
        yield Sample(
            f"{rows}x{dim}-{length}",
            (weight, indices, torch.arange(0, len(indices), length, device="cpu")),
            name,
        )
        return
    for dim in (1, 3, 8, 16, 17, 33, 64, 128, 200):
        indices = torch.randint(0, 50, (30,), device="cpu")
        weight = pack_rows(torch.randn(50, dim, device="cpu"))
        yield Sample(f"50x{dim}", (weight, indices, bag_offsets(30, 9)), name)
    weight = pack_rows(torch.randn(50, 40, device="cpu"))
    indices, offsets = torch.randint(0, 50, (30,), device="cpu"), bag_offsets(30, 9)
    yield Sample("50x40-mean", (weight, indices, offsets, "mean"), name)
    yield Sample("50x40-int32", (weight, indices.int(), offsets.int()), name)
    scales = values(30, dtype=torch.float32)
    yield Sample("50x40-weighted", (weight, indices, offsets, "sum", scales), name)
    ends = torch.cat((offsets, torch.tensor([30], device="cpu")))
    yield Sample("50x40-last_offset", (weight, indices, ends, "mean", None, True), name)
    yield Sample("50x40-two_dimensional", (weight, indices.view(6, 5)), name)
    yield Sample("50x40-no_bag", (weight, indices[:0], offsets[:0]), name)
    yield Sample(
        "50x40-empty_bags",
        (weight, indices[:0], torch.zeros(3, dtype=torch.int64, device="cpu")),
        name,
    )


def cost(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    include_last_offset: bool,
    out_dtype: str,
    **rest: object,
) -> Cost:
    """Reads a row per index, the indices and the offsets, writes a row per bag."""
    columns = weight.shape[1]
    bags = indices.shape[0] if offsets is None else offsets.numel() - include_last_offset
    written = bags * (columns - ROW_END) * NUMBERS[out_dtype].itemsize
    moved = indices.numel() * columns + nbytes((indices, offsets, rest)) + written
    return Cost(moved, 2 * indices.numel() * columns)


op = register(quantized_embedding_bag, samples, cost, has_gradient=False)
