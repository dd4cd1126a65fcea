"""Timing of several contestants in interleaved rounds, and the statistics of the rounds."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypedDict

from oxytorch import _garbage

Call = Callable[[], object]
Context = Callable[[], AbstractContextManager[Any]]

SETTLE_SECONDS = 0.02
"""Pause before a contestant's turn: the idle OpenMP workers of the one before it still spin."""


class Spread(TypedDict):
    """Median, quartiles and number of a series of measurements, as they stand in the files."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles; with fewer than four values the quartiles are the extremes."""
    if not values:
        raise ValueError("spread: expected at least one value, got none")
    if len(values) < 4:
        low, median, high = min(values), statistics.median(values), max(values)
    else:
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high, "count": len(values)}


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    gc.collect()
    with _garbage.paused():
        yield


def _burst_length(call: Call, warm_up: int, burst_seconds: float) -> int:
    """Number of calls that fill a burst, found while warming up."""
    durations = []
    for _ in range(max(1, warm_up)):
        start = time.perf_counter()
        call()
        durations.append(time.perf_counter() - start)
    shortest = max(min(durations), 1e-7)
    return max(1, min(1000, int(burst_seconds / shortest)))


def interleave(
    calls: Mapping[str, Call],
    *,
    contexts: Mapping[str, Context] | None = None,
    rounds: int,
    warm_up: int = 3,
    burst_seconds: float = 0.05,
    on_round: Callable[[int], None] | None = None,
) -> dict[str, list[float]]:
    """Seconds per call of each contestant, one value per round.

    A round gives every contestant one turn; the order is reversed in every other round, so that
    nobody always follows the same neighbour. A turn is a short pause, one call that is not
    counted (it brings the contestant's weights back into the caches and lets workers of the
    contestant before it fall asleep) and a burst of timed calls, whose median is the value.
    A contestant named in `contexts` has its turns inside a new context of that kind.
    """
    if rounds < 1:
        raise ValueError(f"interleave: expected rounds >= 1, got {rounds}")
    entered = {name: (contexts or {}).get(name, nullcontext) for name in calls}
    lengths = {}
    for name, call in calls.items():
        with entered[name]():
            lengths[name] = _burst_length(call, warm_up, burst_seconds)
    series: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    with _without_garbage_collection():
        for index in range(rounds):
            for name in order if index % 2 == 0 else reversed(order):
                with entered[name]():
                    series[name].append(_turn(calls[name], lengths[name]))
            if on_round is not None:
                on_round(index + 1)
    return series


def _turn(call: Call, length: int) -> float:
    time.sleep(SETTLE_SECONDS)
    call()
    durations = []
    for _ in range(length):
        start = time.perf_counter()
        call()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)


def paired_ratio(base: Sequence[float], other: Sequence[float]) -> Spread:
    """base / other, round by round: how many times faster `other` is than `base`."""
    if len(base) != len(other):
        raise ValueError(
            f"paired_ratio: expected series of one length, got {len(base)} and {len(other)}"
        )
    return spread([a / b for a, b in zip(base, other, strict=True)])


def geometric_mean(values: Sequence[float]) -> float:
    """The n-th root of the product: the right mean for ratios."""
    return statistics.geometric_mean(values)
