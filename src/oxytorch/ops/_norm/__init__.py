"""What the normalizations over the last dimension share in Python: their sample shapes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .._samples import MEBI, WIDTHS, rows_of_bytes


def shapes(dtype: torch.dtype, size: str, tensors: int) -> Iterator[tuple[int, ...]]:
    """Shapes of x for a call whose traffic is `tensors` times the size of x."""
    if size == "cache":
        yield rows_of_bytes(MEBI // 2 // tensors, 768, dtype)
    elif size == "memory":
        yield rows_of_bytes(320 * MEBI // tensors, 4096, dtype)
    else:
        yield from ((3, width) for width in WIDTHS)
        yield from ((0, 8), (2, 0), (2, 3, 40), (17_000,))
