"""Ways through code are the same where every branch is decided alike, on whichever Python."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import oxytorch
from oxytorch.program.way import Way, new_way, what_hides_ways

has_monitoring = pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.12 and later")


def _way(of: Callable[..., Any], *given: Any) -> Way:
    way = new_way()
    with way.watching():
        of(*given)
    assert way.unseen == ""
    return way


def _loop(x: Any) -> int:
    total = 0
    for _ in range(len(x)):
        total += 1
    return total


def _raises(x: Any) -> int:
    try:
        return x[2]  # type: ignore[no-any-return]
    except IndexError:
        return 0


def _suppresses(x: Any) -> int:
    with contextlib.suppress(IndexError):
        return x[2]  # type: ignore[no-any-return]
    return 0


def _generated(x: Any) -> Iterator[int]:
    for each in x:
        yield 1 if each else 2


def _double(x: Any) -> Any:
    return x * 2


def _triple(x: Any) -> Any:
    return x * 3


def _nested(x: Any) -> Any:
    def inner(value: Any) -> Any:
        return value if value else None

    return inner(len(x) > 2)


BRANCHES: dict[str, Callable[[Any], Any]] = {
    # each decides something else for [0, 1] and for [1, 1, 1]
    "if": lambda x: 1 if len(x) > 2 else 2,
    "and": lambda x: len(x) > 2 and x,
    "or": lambda x: len(x) > 2 or x,
    "chain": lambda x: 0 < x[0] < 5,
    "kind of none": lambda x: x.get if x[0] is None else x[0] or x,
    "list": lambda x: [1 if each else 2 for each in x],
    "filter": lambda x: [each for each in x if each],
    "set": lambda x: {each or 3 for each in x},
    "dictionary": lambda x: {each: 1 if each else 2 for each in x},
    "generator": lambda x: sum(1 if each else 2 for each in x),
    "function that yields": lambda x: sum(_generated(x)),
    "any": lambda x: any(each == 0 for each in x),
    "key": lambda x: sorted(x, key=lambda each: each if each else 7),
    "loop": _loop,
    "exception": _raises,
    "context": _suppresses,
    "table": lambda x: {2: _double, 3: _triple}[len(x)](x),
    "partial": lambda x: functools.partial({2: _double, 3: _triple}[len(x)], x)(),
    "nested": _nested,
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_way_tells_branches(name: str) -> None:
    of = BRANCHES[name]
    first = _way(of, [0, 1])
    assert first.is_same(_way(of, [0, 1]))
    assert not first.is_same(_way(of, [1, 1, 1]))
    for _ in range(200):  # Python writes other instructions into code that runs often
        of([0, 1])
        of([1, 1, 1])
    assert first.is_same(_way(of, [0, 1]))
    assert not first.is_same(_way(of, [1, 1, 1]))


def test_code_that_is_made_anew_is_the_same() -> None:
    def made(name: str) -> None:
        places: dict[str, Any] = {}
        for _ in range(2):
            exec("def f(x):\n    return 1 if x else 2", places)
            places["f"](name)

    assert _way(made, "a").is_same(_way(made, "b"))
    assert not _way(made, "a").is_same(_way(made, ""))


def test_torchs_layers_are_part_of_it() -> None:
    norm = nn.BatchNorm1d(3).eval()

    def run() -> None:
        with torch.no_grad():
            norm(torch.ones(2, 3))

    first = _way(run)
    assert first.is_same(_way(run))
    norm.train()
    assert not first.is_same(_way(run))


def test_nothing_is_noted_while_paused() -> None:
    def run(value: int) -> None:
        _double(1)
        with way.paused():
            BRANCHES["if"]([0] * value)
            with way.paused():
                _double(1)
            _triple(1)
        _double(1)

    ways = []
    for value in (2, 3):
        way = new_way()
        with way.watching():
            run(value)
        ways.append(way)
    assert ways[0].is_same(ways[1])
    assert not ways[0].is_same(_way(_loop, []))


def test_other_threads_are_not_noted() -> None:
    ends = threading.Event()

    def calls() -> None:
        while not ends.is_set():
            for of in BRANCHES.values():
                of([1, 1, 1])

    def all_branches() -> None:
        for of in BRANCHES.values():
            of([0, 1])

    first = _way(all_branches)
    threads = [threading.Thread(target=calls) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        found = [_way(all_branches) for _ in range(30)]
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    assert all(first.is_same(each) for each in found)


def test_an_error_ends_it() -> None:
    with pytest.raises(KeyError):
        _way({}.__getitem__, 1)
    assert what_hides_ways() == "" and sys.gettrace() is None and gc.isenabled()


@has_monitoring
def test_nothing_stays_behind() -> None:
    from sys import monitoring  # type: ignore[attr-defined]

    before = [monitoring.get_tool(tool) for tool in range(6)]
    for of in BRANCHES.values():
        _way(of, [0, 1])
    assert [monitoring.get_tool(tool) for tool in range(6)] == before
    for tool in (3, 4, 5):
        monitoring.use_tool_id(tool, "test")
        try:
            assert monitoring.get_events(tool) == 0
            assert monitoring.get_local_events(tool, _loop.__code__) == 0
            for event in (monitoring.events.INSTRUCTION, monitoring.events.PY_START):
                assert monitoring.register_callback(tool, event, None) is None
        finally:
            monitoring.free_tool_id(tool)


@has_monitoring
def test_other_tools_are_told_all_the_same() -> None:
    from sys import monitoring  # type: ignore[attr-defined]

    told: list[Any] = []
    monitoring.use_tool_id(monitoring.PROFILER_ID, "test")
    try:
        event = monitoring.events.LINE
        monitoring.register_callback(
            monitoring.PROFILER_ID, event, lambda *given: told.append(given)
        )
        monitoring.set_local_events(monitoring.PROFILER_ID, _loop.__code__, event)
        _loop([1, 2])
        alone, told[:] = [*told], []
        first = _way(_loop, [1, 2])
        beside, told[:] = [*told], []
        _loop([1, 2])
        assert alone and alone == beside == told
    finally:
        monitoring.set_local_events(monitoring.PROFILER_ID, _loop.__code__, 0)
        monitoring.register_callback(monitoring.PROFILER_ID, event, None)
        monitoring.free_tool_id(monitoring.PROFILER_ID)
    assert first.is_same(_way(_loop, [1, 2]))


@has_monitoring
def test_without_a_free_tool_nothing_is_proven() -> None:
    from sys import monitoring  # type: ignore[attr-defined]

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    for tool in (3, 4, 5):
        monitoring.use_tool_id(tool, "test")
    try:
        assert "other tools" in what_hides_ways()
        way = new_way()
        with way.watching():
            _loop([1])
        assert "other tools" in way.unseen
        optimized = oxytorch.optimize(model, sample_input=torch.randn(2, 8), passes=["program"])
        with torch.no_grad():
            for rows in (3, 4, 4, 5, 6, 7):
                x = torch.randn(rows, 8)
                torch.testing.assert_close(optimized(x), model(x))
        families = optimized.__dict__["forward"]._builder._families
        assert [family.proof for family in families] == [None]
    finally:
        for tool in (3, 4, 5):
            monitoring.free_tool_id(tool)
    with torch.no_grad():
        for rows in (8, 9):
            optimized(torch.randn(rows, 8))
    assert families[0].proof is not None, families[0].unproven
