"""What an allocator would need that knew the whole trace beforehand.

Two bounds. With physical pages that are mapped anywhere at any time, nothing is ever wasted but
what remains of the last page: no allocator that hands out whole pages needs less. With addresses
that stay as they are, allocations are placed one by one where those that are alive at the same time
leave the smallest gap that fits, the largest first: that is a heuristic (the best placement is hard
to find), so an allocator may come out below it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .trace import Kind, Trace, peak, rounded

PAGE = 2 << 20
SMALL = 1 << 20
"""Allocations up to here share a range of their own in the placement, whose size is their peak."""


def pages(trace: Trace) -> int:
    """The least memory of whole pages that serves a trace."""
    return -(-peak(trace).active // PAGE) * PAGE


@dataclass(frozen=True)
class Placement:
    """Where each large allocation lies.

    reserved: bytes in all, whole pages.
    offsets: by number of the allocation.
    small: bytes of the range in front, which the small ones share.
    """

    reserved: int
    offsets: dict[int, int]
    small: int


def lifetimes(trace: Trace) -> list[tuple[int, int]]:
    """The event that makes each allocation, and the one after which its memory is free."""
    found = [[0, len(trace)] for _ in trace.sizes]
    for index, (kind, number) in enumerate(zip(trace.kinds, trace.which, strict=True)):
        if kind == Kind.ALLOC:
            found[number][0] = index
        elif kind in (Kind.FREE, Kind.REUSE):
            found[number][1] = index
    return [(first, last) for first, last in found]


def contiguous(trace: Trace) -> Placement:
    """Place all allocations without overlap, each at one address for its whole life."""
    spans = lifetimes(trace)
    sizes = [rounded(size) for size in trace.sizes]
    small = -(-_peak_of_small(trace, sizes) // PAGE) * PAGE
    large = [number for number, size in enumerate(sizes) if size > SMALL]
    if not large:
        return Placement(small, {}, small)
    orders = (
        sorted(large, key=lambda each: (-sizes[each], spans[each])),
        sorted(large, key=lambda each: (spans[each][0] - spans[each][1], -sizes[each])),
    )
    top, offsets = min((_place(order, sizes, spans) for order in orders), key=lambda each: each[0])
    reserved = small + -(-top // PAGE) * PAGE
    return Placement(reserved, {number: small + at for number, at in offsets.items()}, small)


def _peak_of_small(trace: Trace, sizes: list[int]) -> int:
    now = most = 0
    for kind, number in zip(trace.kinds, trace.which, strict=True):
        if kind == Kind.RELEASE or sizes[number] > SMALL:
            continue
        if kind == Kind.ALLOC:
            now += sizes[number]
        elif kind != Kind.RETIRE:
            now -= sizes[number]
        most = max(most, now)
    return most


def _place(
    order: list[int], sizes: list[int], spans: list[tuple[int, int]]
) -> tuple[int, dict[int, int]]:
    firsts = torch.tensor([spans[each][0] for each in order], device="cpu")
    lasts = torch.tensor([spans[each][1] for each in order], device="cpu")
    bytes_ = torch.tensor([sizes[each] for each in order], device="cpu")
    begins = torch.zeros(len(order), dtype=torch.int64, device="cpu")
    top = 0
    for index in range(len(order)):
        meets = (firsts[:index] < lasts[index]) & (lasts[:index] > firsts[index])
        taken = meets.nonzero().flatten()
        place = _gap(begins[taken], begins[taken] + bytes_[taken], int(bytes_[index]))
        begins[index] = place
        top = max(top, place + int(bytes_[index]))
    return top, dict(zip(order, begins.tolist(), strict=True))


def _gap(begins: Tensor, ends: Tensor, size: int) -> int:
    """The start of the smallest gap between taken ranges that fits; their end if there is none."""
    if not len(begins):
        return 0
    begins, order = begins.sort()
    # Ranges may contain one another: a gap begins where all before it have ended.
    reach = ends[order].cummax(0).values
    starts = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), reach])
    gaps = torch.cat([begins, starts[-1:] + (1 << 60)]) - starts
    gaps[gaps < size] = 1 << 62
    return int(starts[gaps.argmin()])
