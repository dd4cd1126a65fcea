"""Memory for what is read from one end to the other in each call, packed weights, and of what they
replace."""

from __future__ import annotations

import ctypes
import sys

import torch

from .. import _library
from .own_storage import bytes_over

_HUGE_PAGE = 2 << 20
MOST_FREED = 16 << 20
"""Bytes of plain weights upon whose release the heap is trimmed."""
_freed = 0


def empty_bytes(count: int) -> torch.Tensor:
    """Returns a new uint8 tensor [count] on the CPU, for weights that stream through a kernel.

    From 2 MiB on it begins at a huge page and the system is asked for huge pages, where it has
    them: a thread that reads 20 GB/s would else look up five million pages a second.
    """
    if count < _HUGE_PAGE or not _library.loaded:
        return torch.empty(count, dtype=torch.uint8, device="cpu")
    library = _library.functions()
    data = library.oxytorch_map_huge(count)
    if not data:
        return torch.empty(count, dtype=torch.uint8, device="cpu")  # says that there is no memory
    return bytes_over(data, count, library.oxytorch_unmap_huge, data, count)


def note_freed(count: int) -> None:
    """Called when plain weights of so many bytes were released, of many in turn."""
    global _freed
    _freed += count
    if _freed >= MOST_FREED:
        trim_heap()


def trim_heap() -> None:
    """Give the system what is free in the heap: small objects above it keep it there otherwise."""
    global _freed
    _freed = 0
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # it is glibc's
        trim(ctypes.c_size_t(0))
