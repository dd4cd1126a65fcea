"""Whether a packed layer beats torch's own one on this machine, by timing both once.

oneDNN's products are not faster everywhere: they may take fewer threads than there are, upon which
libgomp ends the others and makes new ones for the next operator, and a kind of convolution may have
no fast kernel. So layers of each size are timed beside torch's before they are packed, among
operators that use all threads, and the answer is kept for the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

ROUNDS = 7
"""Turns of both; the least time of each counts, since a busy machine only ever adds to it."""
GAIN = 0.95
"""A layer is packed where it takes at most this part of torch's time."""
LONGEST = 0.25
"""Seconds after which no further round begins."""

_known: dict[Hashable, bool] = {}
_lock = threading.Lock()


def wins(key: Hashable, plain: Callable[[], Tensor], packed: Callable[[], Tensor]) -> bool:
    """Whether `packed` is faster than `plain`. key: what the times depend on, besides threads."""
    key = (key, torch.get_num_threads())
    with _lock:
        if key not in _known:
            with torch.inference_mode():
                _known[key] = _is_faster(plain, packed)
        return _known[key]


def _is_faster(plain: Callable[[], Tensor], packed: Callable[[], Tensor]) -> bool:
    between = torch.zeros(torch.get_num_threads() << 16)  # large enough for all threads
    best = {plain: float("inf"), packed: float("inf")}
    began = time.perf_counter()
    for turn in range(ROUNDS + 1):
        for run in (plain, packed):
            seconds = _seconds(run, between)
            if turn:  # the first turn fills caches
                best[run] = min(best[run], seconds)
        if turn and time.perf_counter() - began > LONGEST:
            break
    return best[packed] <= GAIN * best[plain]


def _seconds(run: Callable[[], Tensor], between: Tensor) -> float:
    between.add_(1)
    began = time.perf_counter()
    for _ in range(2):
        run()
        between.add_(1)
    return time.perf_counter() - began
