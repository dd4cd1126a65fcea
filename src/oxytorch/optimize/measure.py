"""Whether a layer made faster beats torch's own one on this machine, by timing both once.

oneDNN's products are not faster everywhere: they may take fewer threads than there are, upon which
libgomp ends the others and makes new ones for the next operator, and a kind of convolution may have
no fast kernel. So layers of each size are timed beside torch's before they are packed, in turns and
among operators that use all threads, and the answer is kept for the process.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor

TIMED = True
"""Whether layers are timed; else every one is packed that can be, which tests want."""
USUAL_ROWS, MOST_ROWS = (1, 16, 64, 256), 512
"""Rows of the inputs that are timed: where no sample tells, and at most."""
ROUNDS = 11
"""Turns of both, whose median decides: threads that are made anew cost time in most turns, not in
all."""
GAIN = 0.95
"""A layer is packed where it takes at most this part of torch's time."""
NO_LOSS = 1.04
"""And at most this part of it for each larger input, where its size is not known."""
LONGEST = 0.25
"""Seconds after which no further round begins."""

Calls = tuple[Callable[[], Tensor], Callable[[], Tensor]]
"""Torch's own layer, and the packed one."""


def rows_of(size: Sequence[int] | None) -> tuple[int, ...]:
    """The rows to time, more and more, for inputs of a size, or of a size that is not known."""
    return (min(max(1, math.prod(size[:-1])), MOST_ROWS),) if size else USUAL_ROWS


_known: dict[Hashable, int | None] = {}
_lock = threading.Lock()


def first_win(key: Hashable, sizes: Iterable[Calls]) -> int | None:
    """The number of the size from which on a packed layer is faster than torch's own, or None.

    key: what the times depend on, besides threads. sizes: both layers, on larger and larger inputs.
    """
    if not TIMED:
        with torch.inference_mode():
            for plain, packed in sizes:
                plain(), packed()
        return 0
    key = (key, torch.get_num_threads())
    with _lock:
        if key not in _known:
            with torch.inference_mode():
                ratios = [_ratio(plain, packed) for plain, packed in sizes]
            begin = len(ratios)
            while begin and ratios[begin - 1] <= NO_LOSS:
                begin -= 1
            is_gain = any(ratio <= GAIN for ratio in ratios[begin:])
            _known[key] = begin if is_gain else None
        return _known[key]


def _ratio(plain: Callable[[], Tensor], packed: Callable[[], Tensor]) -> float:
    """The packed layer's time divided by torch's: the median of turns."""
    between = torch.zeros(torch.get_num_threads() << 16)  # large enough for all threads
    ratios = []
    began = time.perf_counter()
    for turn in range(ROUNDS + 1):
        times = [_seconds(run, between) for run in (packed, plain)]
        if turn:  # the first turn fills caches
            ratios.append(times[0] / times[1])
        if turn and time.perf_counter() - began > LONGEST:
            break
    return statistics.median(ratios)


def _seconds(run: Callable[[], Tensor], between: Tensor) -> float:
    between.add_(1)
    began = time.perf_counter()
    for _ in range(3):
        run()
        between.add_(1)
    return time.perf_counter() - began
