"""How the C library hands out memory while things are timed."""

from __future__ import annotations

import ctypes
from typing import Literal

Allocation = Literal["reuse", "system"]

M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def keep_freed_memory() -> Allocation:
    """Make glibc's malloc reuse freed memory instead of returning it to the system.

    By default a program returns large freed buffers, or not, depending on what happens to lie
    beside them on the heap. When it does, every call pays for thousands of page faults: the LSTM
    of this benchmark takes 6.5 or 9.5 ms in stock PyTorch, and merely loading another library
    moves it from one to the other. So all contestants run with freed memory kept, as they would
    with jemalloc or tcmalloc. This changes the whole process and is only called in a worker.

    Returns:
        "reuse", or "system" where the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not mallopt(M_MMAP_MAX, 0) or not mallopt(M_TRIM_THRESHOLD, -1):
        return "system"
    return "reuse"
