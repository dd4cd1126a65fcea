"""Which placement runs next, and which one has won."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .figures import Limit
from .placements import Placement

FINALISTS = 3
"""Placements that halving keeps at least, with the simplest one."""
ERRORS = 2.0
"""Two medians differ if they lie further apart than so many standard errors of the difference."""
SHAMOS = 1.0483
"""The standard deviation of normal values over the median distance of two of them."""
OF_MEDIAN = 1.2533
"""The standard error of a median over that of a mean, of normal values: sqrt(pi / 2)."""


@dataclass
class Tally:
    """What has come of a placement.

    values: the figure of each trial; limits: of each limit, its figures.
    failure: why it will not be tried again; empty if it may.
    """

    placement: Placement
    values: list[float] = field(default_factory=list)
    limits: list[list[float]] = field(default_factory=list)
    failure: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def is_measured(self) -> bool:
        """Whether it has a figure and has not failed."""
        return bool(self.values) and not self.failure


@dataclass(frozen=True)
class Goal:
    """What is looked for."""

    is_maximum: bool
    limits: tuple[Limit, ...] = ()

    def excess(self, tally: Tally) -> float:
        """How far a placement is over its limits, as a part of them; 0 within."""
        found = 0.0
        for limit, values in zip(self.limits, tally.limits, strict=True):
            over = statistics.median(values) - limit.most
            found += max(over, 0.0) / (abs(limit.most) or 1.0)
        return found

    def order(self, tally: Tally) -> tuple[float, ...]:
        """Less is better: failures come last, then those over a limit."""
        if not tally.is_measured():
            return (math.inf, 0.0)
        return (self.excess(tally), -tally.median if self.is_maximum else tally.median)


def halving_rounds(count: int, repeats: int) -> list[tuple[int, int]]:
    """How many placements each round has, and how often all of these have run at its end."""
    rounds, target = [(count, 1)], 1
    while target < repeats:
        count = max(math.ceil(count / 2), min(count, FINALISTS))
        target = min(2 * target, repeats)
        rounds.append((count, target))
    return rounds


def halving(tallies: Sequence[Tally], goal: Goal, repeats: int) -> Iterator[Tally]:
    """Each once, then the better half again, until the best have run `repeats` times.

    The first one, which the others are compared with, is always among them.
    """
    done = 0
    for count, target in halving_rounds(len(tallies), repeats):
        kept = [tally for tally in sorted(tallies, key=goal.order)[:count] if not tally.failure]
        if not tallies[0].failure and tallies[0] not in kept:
            kept[count - 1 :] = [tallies[0]]
        yield from in_turns(kept, target - done)
        done = target


def in_turns(tallies: Sequence[Tally], repeats: int) -> Iterator[Tally]:
    """All of them so many times, in turns, so that a slower hour of the machine meets all."""
    for _ in range(repeats):
        for tally in tallies:
            if not tally.failure:
                yield tally


def sample(found: Sequence[Placement], count: int, seed: int) -> list[Placement]:
    """So many of them by chance, and always the first one."""
    chosen = random.Random(seed).sample(range(1, len(found)), min(count, len(found)) - 1)
    return [found[index] for index in (0, *sorted(chosen))]


@dataclass(frozen=True)
class Verdict:
    """The outcome of a search.

    winner: the simplest of those that do not differ from the best beyond noise; None where nothing
        was measured or within the limits.
    best: the one with the best median.
    ties: all those.
    """

    winner: Tally | None
    best: Tally | None
    ties: tuple[Tally, ...] = ()


def judge(tallies: Sequence[Tally], goal: Goal) -> Verdict:
    """Say who has won. Placements that ran less than half as often as the best are out of it."""
    ranked = sorted((each for each in tallies if each.is_measured()), key=goal.order)
    fitting = [each for each in ranked if goal.excess(each) == 0]
    if not fitting:
        return Verdict(None, ranked[0] if ranked else None)
    most = max(len(each.values) for each in fitting)
    known = [each for each in fitting if 2 * len(each.values) >= most]
    best = known[0]
    ties = [each for each in known if each is best or not _differ(best, each, tallies)]
    winner = min(ties, key=lambda each: each.placement.complexity())
    return Verdict(winner, best, tuple(ties))


def noise(tally: Tally, tallies: Sequence[Tally]) -> float | None:
    """The standard deviation of a placement's figures, not less than what is usual in this search.
    None where nothing ran twice."""
    usual = usual_noise(tallies)
    if usual is None:
        return None
    own = _distances(tally)
    return max(_deviation(own) if own else 0.0, usual * abs(tally.median))


def usual_noise(tallies: Sequence[Tally]) -> float | None:
    """The standard deviation of figures of one placement, as a part of its median, by the trials of
    all; None where nothing ran twice."""
    found = [
        distance / abs(tally.median)
        for tally in tallies
        if tally.values and tally.median
        for distance in _distances(tally)
    ]
    return _deviation(found) if found else None


def _distances(tally: Tally) -> list[float]:
    return [abs(one - other) for one, other in itertools.combinations(tally.values, 2)]


def _deviation(distances: Sequence[float]) -> float:
    """The standard deviation, by the median distance of two values, which a few disturbed trials
    hardly move (the estimator of Shamos)."""
    return SHAMOS * statistics.median(distances)


def _differ(one: Tally, other: Tally, tallies: Sequence[Tally]) -> bool:
    total = 0.0
    for tally in (one, other):
        deviation = noise(tally, tallies)
        if deviation is None:
            return one.median != other.median
        total += (OF_MEDIAN * deviation) ** 2 / len(tally.values)
    return abs(one.median - other.median) > ERRORS * math.sqrt(total)
