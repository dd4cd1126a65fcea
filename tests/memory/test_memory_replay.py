"""Replays: what allocators would reserve, within which bounds, and when memory runs out."""

from __future__ import annotations

import json
from pathlib import Path

import made_traces
import pytest

from oxytorch.memory import advise, offline, replay
from oxytorch.memory import trace as traces
from oxytorch.memory.replay import NAMES, write_json
from oxytorch.memory.trace import Kind, Trace, rounded

DATA = Path(__file__).parent / "data"
PROGRAMS = ("lora_finetuning", "mixture_of_experts", "resnet", "serving", "unet")
GiB = 1 << 30


@pytest.mark.parametrize("call", [replay, advise])
def test_wrong_arguments_are_named_with_what_to_do(call) -> None:
    name, trace = call.__name__, made_traces.training(steps=1, layers=1)
    for wrong in ("run.trace", None, 7, [trace]):
        with pytest.raises(TypeError, match=rf"{name}: trace: expected a Trace.*load_trace\("):
            call(wrong)
    for wrong in ("1G", 1e9, True, [1]):
        with pytest.raises(TypeError, match=rf"{name}: limit: expected bytes .* 24 \* 2\*\*30"):
            call(trace, limit=wrong)
    for wrong in (0, -1, 1 << 60):
        with pytest.raises(ValueError, match=f"{name}: limit: .* None for no limit, got {wrong}"):
            call(trace, limit=wrong)


@pytest.mark.parametrize("call", [replay, advise])
def test_trace_that_contradicts_itself_is_refused(call) -> None:
    trace = Trace()
    trace.alloc(1 << 20)
    trace.event(Kind.FREE, 0)
    trace.event(Kind.FREE, 0)
    with pytest.raises(traces.TraceError, match=f"{call.__name__}: trace: event 2 is FREE of"):
        call(trace)


def test_allocators_of_a_replay_are_names() -> None:
    trace = made_traces.training(steps=1, layers=1)
    with pytest.raises(TypeError, match=r"for one of them give \['oxytorch'\]"):
        replay(trace, "oxytorch")
    with pytest.raises(TypeError, match="replay: allocators: expected names, got 7"):
        replay(trace, [7])
    for result in replay(trace, [*NAMES, "expandable_segments:True"], limit=1):
        assert result.failed is not None, result.allocator


def test_our_allocator_wastes_almost_nothing_on_real_programs() -> None:
    wasted = []
    for name in PROGRAMS:
        trace = traces.load(DATA / f"{name}.trace")
        expandable, ours, bound = replay(trace, ["expandable", "oxytorch", "offline-bound"])
        assert ours.fragmentation < expandable.fragmentation, name
        assert ours.fragmentation < bound.fragmentation + 0.03, name
        wasted.append(ours.fragmentation)
    assert sum(wasted) / len(wasted) < 0.025


@pytest.mark.parametrize("make", [made_traces.training, made_traces.serving])
def test_no_allocator_reserves_less_than_the_bound(make) -> None:
    trace = make()
    results = replay(trace, NAMES)
    bound = next(each for each in results if each.allocator == "offline-bound")
    for result in results:
        assert result.peak_reserved >= bound.peak_reserved >= result.peak_allocated
        assert result.failed is None
        assert 0 <= result.fragmentation < 1
        for point in result.timeline:
            assert point.allocated <= point.reserved
        assert max(point.allocated for point in result.timeline) == result.peak_allocated
    assert bound.peak_reserved == -(-traces.peak(trace).active // offline.PAGE) * offline.PAGE


def test_offline_placement_lets_nothing_overlap() -> None:
    for seed in range(3):
        trace = made_traces.training(seed=seed)
        placement, spans = offline.contiguous(trace), offline.lifetimes(trace)
        placed = [
            (*spans[number], offset, offset + rounded(trace.sizes[number]))
            for number, offset in placement.offsets.items()
        ]
        for index, (first, last, begin, end) in enumerate(placed):
            assert placement.small <= begin
            assert end <= placement.reserved
            for other_first, other_last, other_begin, other_end in placed[:index]:
                assert (
                    first > other_last or other_first > last
                    or begin >= other_end or other_begin >= end
                )  # fmt: skip


def test_map_shows_all_that_is_live_at_the_peak() -> None:
    trace = made_traces.training()
    live = set(traces.live_after(trace, traces.peak(trace).event))
    for result in replay(trace, ["native-policy", "expandable", "oxytorch"]):
        held = {each.number: each for each in result.ranges if each.number is not None}
        assert set(held) == live
        for number, each in held.items():
            assert each.size >= rounded(trace.sizes[number])


def test_memory_runs_out_at_the_event_that_asks_for_too_much() -> None:
    trace = made_traces.training()
    names = ["native-policy", "expandable_segments:False", "oxytorch", "offline-bound"]
    peak = traces.peak(trace).allocated
    native, model, ours, bound = replay(trace, names, limit=int(1.03 * peak))
    assert native.failed == model.failed is not None
    assert trace.kinds[native.failed] == Kind.ALLOC
    assert native.reason
    assert ours.failed is None
    assert bound.failed is None
    for result in replay(trace, names, limit=peak // 2):
        assert result.failed is not None
        assert result.peak_reserved <= peak // 2 or result.allocator == "offline-bound"


def test_emptied_cache_is_given_back_by_every_policy() -> None:
    trace = Trace()
    number = trace.alloc(GiB)
    trace.event(Kind.FREE, number)
    trace.event(Kind.RELEASE, -1)
    trace.alloc(512)
    for result in replay(trace, ["native-policy", "expandable", "oxytorch"]):
        assert result.timeline[-1].reserved <= 4 << 20
        assert result.peak_reserved >= GiB


def test_block_in_use_elsewhere_is_not_handed_out() -> None:
    trace = Trace()
    number = trace.alloc(64 << 20)
    trace.event(Kind.RETIRE, number)
    trace.alloc(64 << 20)
    trace.event(Kind.REUSE, number)
    trace.alloc(64 << 20)
    for result in replay(trace, NAMES):
        assert result.peak_allocated == 128 << 20
        assert result.peak_reserved >= 128 << 20
        assert result.allocator == "expandable" or result.peak_reserved == 128 << 20


def test_empty_trace_reserves_nothing() -> None:
    for result in replay(Trace(), NAMES):
        assert (result.peak_allocated, result.peak_reserved, result.fragmentation) == (0, 0, 0.0)


@pytest.mark.parametrize("name", ["jemalloc", "oxytorch ", ""])
def test_unknown_allocator_names_the_choices(name: str) -> None:
    with pytest.raises(ValueError, match="expected allocators out of native-policy, expandable"):
        replay(Trace(), [name])


def test_numbers_are_written_as_json(tmp_path: Path) -> None:
    trace = made_traces.training(steps=2)
    results = replay(trace, NAMES)
    write_json(results, trace, tmp_path / "run.json")
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["events"] == len(trace)
    assert [each["allocator"] for each in found["results"]] == [*NAMES]
    for row, result in zip(found["results"], results, strict=True):
        assert row["peak_reserved"] == result.peak_reserved
        assert row["fragmentation"] == result.fragmentation
        assert row["timeline"][-1][0] == len(trace) - 1
