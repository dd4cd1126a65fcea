"""Which placement runs next, and which one wins; what counts as a figure."""

from __future__ import annotations

import random

import pytest

from oxytorch.launch.tuning.figures import Figure, read_limit
from oxytorch.launch.tuning.placements import Placement
from oxytorch.launch.tuning.search import (
    Goal,
    Tally,
    halving,
    halving_rounds,
    in_turns,
    judge,
    noise,
    sample,
)

MOST, LEAST = Goal(True), Goal(False)


def tally(ninstances: int, *values: float, limits: tuple[float, ...] = ()) -> Tally:
    return Tally(Placement(ninstances, 4), list(values), [list(limits)] if limits else [])


def simulated(schedule, speed, spread: float = 0.0) -> None:
    """Run a schedule against speeds by number of instances; 0 fails."""
    chance = random.Random(1)
    for each in schedule:
        value = speed(each.placement.ninstances)
        if value:
            each.values.append(value * (1 + chance.uniform(-spread, spread)))
        else:
            each.failure = "failed"


def test_halving_measures_the_better_half_again_and_finds_the_best():
    tallies = [tally(count) for count in range(1, 33)]
    simulated(halving(tallies, MOST, 5), lambda n: 100 - abs(n - 20), 0.002)
    counts = {each.placement.ninstances: len(each.values) for each in tallies}
    assert counts[20] == 5 and counts[1] == 5  # the first one is what others are compared with
    assert sorted(counts.values()) == [1] * 16 + [2] * 8 + [4] * 4 + [5] * 4
    assert sum(counts.values()) == sum(
        kept * (target - before)
        for (kept, target), before in zip(halving_rounds(32, 5), (0, 1, 2, 4), strict=True)
    )
    winner = judge(tallies, MOST).winner
    assert winner is not None and winner.placement.ninstances == 20


def test_halving_drops_what_failed_the_first_one_too():
    tallies = [tally(count) for count in range(1, 5)]
    simulated(halving(tallies, LEAST, 3), lambda n: 0 if n in (1, 3) else n)
    assert [len(each.values) for each in tallies] == [0, 3, 0, 3]
    winner = judge(tallies, LEAST).winner
    assert winner is not None and winner.placement.ninstances == 2


def test_grid_takes_turns():
    tallies = [tally(1), tally(2)]
    order = [each.placement.ninstances for each in in_turns(tallies, 2)]
    assert order == [1, 2, 1, 2]


def test_sample_has_the_simplest_one_and_is_the_same_each_time():
    listed = [Placement(count, 1) for count in range(1, 30)]
    chosen = sample(listed, 6, seed=3)
    assert chosen[0] == listed[0] and len(set(chosen)) == 6
    assert chosen == sample(listed, 6, seed=3) != sample(listed, 6, seed=4)
    assert len(sample(listed, 99, seed=0)) == len(listed)


def test_simplest_wins_among_those_that_do_not_differ():
    close = [tally(1, 100, 104, 96), tally(2, 102, 98, 105), tally(4, 50, 51, 52)]
    verdict = judge(close, MOST)
    assert verdict.winner is close[0] and verdict.best is close[1]
    assert verdict.ties == (close[1], close[0])
    far = [tally(1, 100, 101, 99), tally(2, 120, 121, 119)]
    assert judge(far, MOST).winner is far[1]
    assert judge(far, LEAST).winner is far[0]


def test_one_disturbed_trial_makes_no_tie():
    tallies = [tally(1, 10, 10.1, 9.9, 10, 300), tally(2, 8, 8.1, 7.9, 8.05, 8)]
    assert judge(tallies, LEAST).winner is tallies[1]


def test_noise_of_few_trials_is_that_of_the_others():
    tallies = [tally(1, 100.0), tally(2, 90, 100, 110, 95, 105)]
    assert noise(tallies[0], tallies) == pytest.approx(1.0483 * 10)
    assert noise(tallies[0], tallies[:1]) is None


def test_limits_come_before_the_figure():
    goal = Goal(True, (read_limit("latency: 20"),))
    tallies = [
        tally(1, 50, 51, limits=(10, 10)),
        tally(2, 70, 71, limits=(19, 20)),
        tally(4, 90, 91, limits=(30, 31)),
    ]
    assert judge(tallies, goal).winner is tallies[1]
    assert [each.placement.ninstances for each in sorted(tallies, key=goal.order)] == [2, 1, 4]
    none = judge(tallies[2:], goal)
    assert none.winner is None and none.best is tallies[2]


@pytest.mark.parametrize(
    ("what", "text", "value"),
    [
        ("throughput", "throughput: 12.5", 12.5),
        ("throughput", "INFO  Throughput = 1.5e3 images/s", 1500.0),
        ("throughput", "throughput: 1\nthroughput: 3\ndone", 3.0),
        ("latency", "latency: 12.5ms", 12.5),
        ("latency", "p99 latency (ms): 4", None),
        ("latency (ms)", "p99 latency (ms): 4", 4.0),
        ("throughput", "mythroughput: 3", None),
        ("throughput", "throughput: nan", None),
        ("throughput", "throughput: fast", None),
        (r"(\d+\.?\d*) it/s", "12 it/s, 13.5 it/s", 13.5),
        (r"took (\w+)", "took long", None),
    ],
)
def test_figures_are_read_from_lines_or_by_an_expression(what, text, value):
    assert Figure(what, "sum").find(text) == value


def test_figures_of_instances_become_one():
    texts = ["x: 1", "x: 3"]
    assert [Figure("x", how).of_all(texts) for how in ("sum", "max", "min", "mean")] == [4, 3, 1, 2]
    assert Figure("x", "sum").of_all(["x: 1", "y: 3"]) is None


@pytest.mark.parametrize("text", ["latency", "latency: fast", ": 3", ""])
def test_limits_that_say_no_number_are_refused(text):
    with pytest.raises(ValueError, match="expected NAME: NUMBER"):
        read_limit(text)
