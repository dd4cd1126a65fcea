from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from oxytorch.benchmark.core.rounds import geometric_mean, interleave, paired_ratio, spread


def test_contestants_take_turns_in_alternating_order() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    series = interleave(calls, rounds=2, warm_up=1, burst_seconds=0.0)
    # Warm-up, then per turn one call that is not counted and one that is.
    assert "".join(order) == "abc" + "aabbcc" + "ccbbaa"
    assert {name: len(values) for name, values in series.items()} == {"a": 2, "b": 2, "c": 2}


def test_contexts_hold_during_every_call_of_their_contestant() -> None:
    inside = False
    seen: list[bool] = []

    @contextmanager
    def context() -> Iterator[None]:
        nonlocal inside
        inside = True
        yield
        inside = False

    calls = {"in": lambda: seen.append(inside), "out": lambda: seen.append(not inside)}
    interleave(calls, contexts={"in": context}, rounds=2, warm_up=1, burst_seconds=0.0)
    assert seen and all(seen)


def test_spread_has_median_and_quartiles() -> None:
    values = spread([5.0, 1.0, 3.0, 2.0, 4.0])
    assert values == {"median": 3.0, "low": 2.0, "high": 4.0, "count": 5}
    assert spread([2.0, 1.0])["low"] == 1.0


def test_ratio_is_paired_by_round() -> None:
    assert paired_ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])["median"] == 2.0
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: interleave({"a": int}, rounds=0), "expected rounds >= 1, got 0"),
        (lambda: paired_ratio([1.0], [1.0, 2.0]), "got 1 and 2"),
        (lambda: spread([]), "expected at least one value, got none"),
    ],
)
def test_bad_arguments_are_named(call: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()  # type: ignore[operator]
