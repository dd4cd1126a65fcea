"""How fast this process can read weights: sums over buffers that are allocated as they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..core.placement import empty_bytes

_MOST_BYTES = 512 << 20
"""Bytes of the buffers: far more than any cache holds."""

_SETS = 3
"""Sets of buffers, one after the other: the bandwidth depends on where pages happen to lie."""


def read_limit(sizes: Sequence[int], sweeps: int = 4) -> float:
    """Bytes per second that all of torch's threads read, in this process, right now.

    sizes: bytes of the packed weights in the order in which a model reads them; buffers of these
    sizes are allocated in the same way, up to 512 MiB in all.
    A sweep reads every buffer once, by a sum or by a product with itself; the result is the best
    way's median over the sweeps of the better set of buffers.
    """
    if not sizes or min(sizes) < 0:
        raise ValueError(f"read_limit: expected sizes >= 0, got {list(sizes)}")
    return max(_rate_of(_buffers(sizes), sweeps) for _ in range(_SETS))


def _buffers(sizes: Sequence[int]) -> list[Tensor]:
    """float32 ones in buffers of these sizes, repeated until they fill the caches many times."""
    total = max(1, sum(sizes))
    wanted = list(sizes)
    while sum(wanted) < _MOST_BYTES // 4 and sum(wanted) < 64 * total:
        wanted += sizes
    buffers: list[Tensor] = []
    taken = 0
    for size in wanted:
        if taken + size > _MOST_BYTES and buffers:
            break
        count = max(1, min(size, _MOST_BYTES) // 4)
        buffers.append(empty_bytes(4 * count).view(torch.float32).fill_(1.0))
        taken += size
    return buffers


def _rate_of(buffers: Sequence[Tensor], sweeps: int) -> float:
    total = sum(buffer.nbytes for buffer in buffers)

    def rate(read: Callable[[Tensor], Tensor]) -> float:
        taken = []
        for _ in range(sweeps + 1):
            begin = time.perf_counter()
            for buffer in buffers:
                read(buffer)
            taken.append(time.perf_counter() - begin)
        return total / sorted(taken[1:])[sweeps // 2]

    return max(rate(torch.sum), rate(lambda buffer: torch.dot(buffer, buffer)))
