"""The times of whole calls, taken in turns, which another load of the machine changes alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from .. import _garbage
from . import measure

Run = Callable[[], Any]
"""A call of a model."""

ROUNDS = 9
"""Paired rounds per comparison; the median of their ratios decides."""
FIRST_ROUNDS = 3
"""Rounds after which a model that is no slower than it was counts as such, if calls are not
short."""
CLEAR_ROUNDS, HOPELESS = 2, 1.5
"""Rounds after which it counts as faster where it gained in each, and after which one that
took so many times as long in each is timed no more."""
DECISIVE, DECISIVE_LONG = 0.5, 0.85
"""Part of the time of the others in the first round, up to which no other round is needed: for
short calls and for others."""
LONGEST = 3.0
"""Seconds that further rounds may take, where the first ones say that it is slower."""
SHORT = 0.05
"""Seconds of two models' calls together up to which calls are short: each is timed after one that
is not."""
ENOUGH = 0.05
"""Seconds of rounds of short calls, before which they do not decide."""
GAIN = 0.98
"""What takes at most this fraction of the time of another has gained."""

Turns = Sequence[tuple[float, ...]]
"""The seconds of each call, in each turn."""


def taken(runs: Sequence[Run], warm: Sequence[int] = (), known: float | None = None) -> Turns:
    """The times of calls in turns: few where the last call is no slower than the others, more where
    it may be.

    warm: the numbers of those that have just run.
    known: the seconds of the first, if it was timed.
    """
    measure.hold_heap()
    with _garbage.paused():
        for number, run in enumerate(runs):
            if number not in warm:
                run()
        timed = [] if known is None else [known]
        first = (*timed, *map(_seconds, runs[len(timed) :]))
        is_short = _are_short(first) and not is_settled([first])
        most = ROUNDS if is_short else max(FIRST_ROUNDS, min(ROUNDS, int(LONGEST / sum(first))))
        turns = [] if is_short else [first]
        began = time.perf_counter()
        while len(turns) < most:
            if is_settled(turns) and (not is_short or time.perf_counter() - began > ENOUGH):
                break
            seen = [first, *turns]
            again = [_again(seen, run, number, is_short) for number, run in enumerate(runs)]
            turns.append(tuple(again))
    return turns


def all_rounds(runs: Sequence[Run]) -> Turns:
    """The same of every round, however clear the first ones are."""
    measure.hold_heap()
    for run in runs:
        run()
    is_short = sum(map(_seconds, runs)) < SHORT
    return [tuple(_turn(run, is_short) for run in runs) for _ in range(ROUNDS)]


def compared(turns: Turns, first: int, second: int) -> tuple[float, float, float]:
    """The median ratio of two calls, second / first, and both median times in seconds."""
    pairs = [(turn[first], turn[second]) for turn in turns]
    ratio = statistics.median(b / a for a, b in pairs)
    return ratio, statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def in_words(ratio: float, before: float, after: float) -> str:
    """Medians, and the median ratio of pairs, which another load of the machine hardly moves."""
    return f"{before * 1e3:.4g} ms -> {after * 1e3:.4g} ms (call by call {ratio:.3f} times as long)"


def why_not_faster(run: Run, other: Run) -> str:
    """The times of two calls that have just run, where the other one takes longer; else nothing."""
    ratio, before, after = compared(taken((run, other), warm=(0, 1)), 0, 1)
    return in_words(ratio, before, after) if ratio > 1.0 else ""


def is_settled(turns: Turns) -> bool:
    """Whether the last call is surely no slower than the others."""
    for turn in turns[:1]:
        part = DECISIVE if _are_short(turn) else DECISIVE_LONG
        if turn[-1] <= part * min(turn[:-1]):
            return True
    if len(turns) >= CLEAR_ROUNDS and all(t[-1] <= GAIN * min(t[:-1]) for t in turns):
        return True
    last = len(turns[0]) - 1 if turns else 0
    return len(turns) >= FIRST_ROUNDS and all(
        compared(turns, n, last)[0] <= 1.0 for n in range(last)
    )


def _again(turns: Turns, run: Run, number: int, is_short: bool) -> float:
    """The time of a call; of one that was far slower than the last, what it took at least."""
    seconds = [turn[number] for turn in turns]
    if len(turns) >= CLEAR_ROUNDS and min(seconds) > HOPELESS * max(turn[-1] for turn in turns):
        return min(seconds)
    return _turn(run, is_short)


def _are_short(turn: Sequence[float]) -> bool:
    return sum(turn) < SHORT * len(turn) / 2


def _turn(run: Run, is_short: bool) -> float:
    """Seconds of a call: a short one after another of the same model, as in a program's loop, where
    its weights lie in the caches still."""
    if is_short:
        run()
    return _seconds(run)


def _seconds(run: Run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
