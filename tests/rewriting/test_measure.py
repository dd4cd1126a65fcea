"""What is decided from times: from which size on a faster layer is used, if at all."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from oxytorch.optimize import tune
from oxytorch.optimize.passes import kernels
from oxytorch.rewriting import measure
from oxytorch.rewriting import turns as whole_turns


@pytest.fixture(autouse=True)
def _timed(pack_small_layers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TIMED", True)
    monkeypatch.setattr(measure, "_known", {})
    monkeypatch.setattr(tune, "_turns", lambda runs, *_: [(1.0,) * len(runs)])


@pytest.mark.parametrize(
    ("ratios", "first"),
    [
        ([0.5, 0.5], 0),
        ([1.0, 0.9], 0),
        ([2.0, 0.5, 0.5], 1),
        ([1.2, 1.5, 1.0, 0.9], 2),
        ([0.5, 1.2], None),
        ([1.0, 1.0], None),
        ([0.96], None),
    ],
)
def test_a_layer_is_used_from_where_it_never_loses(
    monkeypatch: pytest.MonkeyPatch, ratios: list[float], first: int | None
) -> None:
    given = iter(ratios[::-1])  # the largest input first, and none below one that loses
    monkeypatch.setattr(measure, "_ratio", lambda plain, ours: next(given))
    sizes: list[measure.Calls] = [(torch.Tensor, torch.Tensor)] * len(ratios)
    assert measure.first_win("a layer", sizes) == first
    # Known from now on: nothing more is timed.
    assert measure.first_win("a layer", sizes) == first


def test_times_are_compared() -> None:
    def slow() -> Tensor:
        time.sleep(5e-2)
        return torch.empty(0)

    def fast() -> Tensor:
        return torch.empty(0)

    assert measure.first_win("slower", [(fast, slow)]) is None
    assert measure.first_win("faster", [(slow, fast)]) == 0


def test_what_stays_of_torchs_own_may_cost_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    for ratio, stays in ((1.0, True), (measure.MOST_BESIDE_LOSS + 0.01, False)):
        monkeypatch.setattr(measure, "_ratio", lambda plain, ours, ratio=ratio: ratio)
        assert measure.may_stay_beside(("layer", ratio), (torch.Tensor, torch.Tensor)) is stays


@pytest.mark.parametrize(
    ("ratios", "wins"),
    [
        ([0.5, 0.5, 0.5], 3),
        ([0.5, 1.0, 1.0], 3),  # it is nowhere slower
        ([0.5, 0.9, 1.2], 2),
        ([0.5, 1.0, 1.2], 1),
        ([0.5, 1.2, 0.5], 1),  # only smaller sizes count
        ([1.0, 0.5, 0.5], 0),
        ([1.2, 0.5, 0.5], 0),
    ],
)
def test_few_rows_win_alone(
    monkeypatch: pytest.MonkeyPatch, ratios: list[float], wins: int
) -> None:
    given = iter(ratios)
    monkeypatch.setattr(measure, "_known", {})
    monkeypatch.setattr(measure, "TIMED", True)
    monkeypatch.setattr(measure, "_ratio", lambda plain, ours: next(given))
    assert measure.wins_of("few", [(torch.Tensor, torch.Tensor)] * 3) == wins


def test_inputs_have_as_many_dimensions_as_the_samples() -> None:
    shapes = {None: (1, 4, 8), (9,): (8,), (9, 8): (4, 8), (2, 3, 5, 8): (1, 1, 4, 8)}
    for size, shape in shapes.items():
        assert measure.input_of(4, 8, size).shape == shape


def test_rows_are_the_samples_or_the_usual_ones() -> None:
    assert measure.rows_of((2, 3, 8)) == (6,)
    assert measure.rows_of((8,)) == (1,)
    assert measure.rows_of((4096, 4, 8)) == (measure.MOST_ROWS,)
    assert measure.rows_of(None) == measure.USUAL_ROWS
    assert measure.rows_of(None, 1 << 27) == (1, 8)  # a large weight is timed with fewer
    assert measure.rows_of(None, 1 << 40) == (1,)


def test_layers_of_about_one_size_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[float] = []
    monkeypatch.setattr(measure, "_ratio", lambda plain, ours: timed.append(1.0) or 1.0)
    layers = [nn.Linear(256, width) for width in range(512, 640, 16)]
    oxytorch.optimize(nn.ModuleList(layers).eval())
    assert len(timed) == len(measure.USUAL_ROWS)
    assert measure.about(511) != measure.about(512) != measure.about(513)


def test_rows_of_a_sample_do_not_slow_down_fewer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(64, 64).eval()
    x = torch.randn(32, 64)
    for ratios, least in (([0.5, 2.0], 32), ([0.5, 0.5, 2.0], 16), ([0.5, 0.5, 0.5], 0)):
        given = iter([0.5, *ratios])  # the first one is of panels beside oneDNN's order
        monkeypatch.setattr(measure, "_ratio", lambda plain, ours, given=given: next(given))
        monkeypatch.setattr(measure, "_known", {})
        weight = oxytorch.optimize(layer, sample_input=x).weight
        assert weight.least_rows == least


@pytest.mark.parametrize("rows", [1, 15, 16])
def test_norms_with_few_rows_run_their_own_code(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(kernels, "first_win", lambda key, sizes: 1)
    monkeypatch.setattr(kernels, "may_stay_beside", lambda key, both: True)
    model = oxytorch.optimize(nn.Sequential(nn.LayerNorm(24)).eval())
    calls: list[str] = []
    forward = model[0].__dict__["forward"]  # type: ignore[index]
    own = forward.own
    monkeypatch.setattr(forward, "own", lambda *args: calls.append("own") or own(*args))
    x = torch.randn(rows, 24)
    with torch.no_grad():
        torch.testing.assert_close(model(x), nn.functional.layer_norm(x, (24,)))
    assert bool(calls) == (rows < measure.USUAL_ROWS[1])


def test_what_is_as_fast_is_left_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "first_win", lambda key, sizes: None)
    model = oxytorch.optimize(nn.Sequential(nn.LayerNorm(24)).eval())
    left = {e.module: e.detail for e in oxytorch.explain(model).skipped}
    assert "as fast" in left["0"] and "forward" not in model[0].__dict__  # type: ignore[index]


@pytest.mark.parametrize(("ratio", "is_kept"), [(1.5, False), (1.0, True), (0.5, True)])
def test_a_model_that_is_slower_as_a_whole_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, ratio: float, is_kept: bool
) -> None:
    monkeypatch.setattr(measure, "_ratio", lambda plain, ours: 0.5)
    monkeypatch.setattr(tune, "_turns", lambda *_: [(1.0, ratio)])
    monkeypatch.setattr(tune, "paired", lambda *_: (ratio, 1.0, ratio))
    stock = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).eval()
    model = oxytorch.optimize(stock, sample_input=torch.randn(8, 64))
    report = oxytorch.explain(model)
    assert bool(report.applied) is is_kept
    assert (report.tuned is None) is is_kept
    if not is_kept:
        assert "kept the original" in str(report)


def test_a_dtype_that_was_asked_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_ratio", lambda plain, ours: 0.5)
    monkeypatch.setattr(measure, "_quartiles", lambda calls: (2.0, 3.0, 1.0))
    monkeypatch.setattr(tune, "_turns", lambda *_: [(1.0, 1.5)])
    monkeypatch.setattr(tune, "paired", lambda *_: (1.5, 1.0, 1.5))
    stock = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).eval()
    x = torch.randn(8, 64)
    model = oxytorch.optimize(stock, sample_input=x, dtype=torch.bfloat16)
    assert {e.pass_name for e in oxytorch.explain(model).applied} == {"cast"}
    assert model[0].weight.dtype == torch.bfloat16 and model(x).dtype == torch.bfloat16  # type: ignore[index]


def test_times_that_agree_are_believed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for spread, turns in ((1.0, measure.FEWEST_ROUNDS), (0.9, measure.ROUNDS)):
        taken = {"plain": 1e-2, "packed": 0.95e-2, "_nothing": 0.0}
        calls: list[int] = []

        def seconds(
            run: Any,
            between: Tensor,
            count: int,
            taken: dict[str, float] = taken,
            calls: list[int] = calls,
            spread: float = spread,
        ) -> float:
            calls.append(count)
            is_odd = run.__name__ == "packed" and len(calls) // 3 % 2
            return taken[run.__name__] * (spread if is_odd else 1.0)

        def plain() -> Tensor:
            return torch.empty(0)

        def packed() -> Tensor:
            return torch.empty(0)

        monkeypatch.setattr(measure, "_seconds", seconds)
        assert 0.8 < measure._ratio(plain, packed) < 1.0
        assert len(calls) == 3 * (turns + 1)
        assert {*calls} == {1}  # long ones are called once a turn


@pytest.mark.parametrize(
    ("turns", "is_settled"),
    [
        ([(1.0, 1.0, 0.9)], False),
        ([(1.0, 1.1, 0.85)], True),
        ([(1.0, 0.9, 0.85)], False),
        ([(0.01, 0.012, 0.0085)], False),
        ([(0.01, 0.012, 0.005)], True),
        ([(0.01, 0.01, 0.008)] * 2, True),
        ([(1.0, 1.0, 0.95)] * 2, True),
        ([(1.0, 1.0, 0.99)] * 2, False),
        ([(1.0, 1.0, 0.99)] * 3, True),
        ([(1.0, 0.9, 0.95)] * 3, False),
        ([(0.9, 1.0, 0.95)] * 3, False),
        ([(1.0, 1.0, 0.8)] * 2 + [(1.0, 1.0, 1.2)], True),
    ],
)
def test_whole_models_are_timed_until_none_is_faster(
    turns: list[tuple[float, ...]], is_settled: bool
) -> None:
    assert whole_turns.is_settled(turns) is is_settled


def test_what_takes_far_longer_is_timed_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"fast": [1.0, 1.1, 1.2], "close": [1.1], "far": [2.0], "_nothing": [0.0]}
    called: list[str] = []

    def seconds(run: Any, between: Tensor, count: int) -> float:
        called.append(run.__name__)
        times = taken[run.__name__]
        return times[called.count(run.__name__) % len(times)] * 1e-2

    def fast() -> None:
        raise AssertionError("seconds calls nothing")

    def close() -> None:
        fast()

    def far() -> None:
        fast()

    monkeypatch.setattr(measure, "_seconds", seconds)
    times = measure._quartiles([fast, close, far])
    assert times[0] < times[1] < times[2] == 2e-2
    assert called.count("fast") == called.count("close") > 3
    assert called.count("far") == 1 + measure.CLEAR_ROUNDS  # the first fills caches


def test_one_that_is_clearly_the_fastest_ends_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    takes = {1: 1e-2, 2: 1.3e-2}

    def seconds(run: Any, between: Tensor, count: int) -> float:
        if run is measure._nothing:
            return 0.0
        called.append(run())
        return takes[called[-1]]

    monkeypatch.setattr(measure, "_seconds", seconds)
    assert measure._quartiles([lambda: 1, lambda: 2]) == (1e-2, 1.3e-2)
    assert called == [1, 2] * (1 + measure.CLEAR_ROUNDS)


@pytest.mark.parametrize(("turns", "times"), [(1, 1), (2, 0)])
def test_a_model_that_is_far_slower_is_timed_no_more(turns: int, times: int) -> None:
    calls: list[str] = []
    seen = [(3.0, 1.0), (2.5, 1.1)][:turns]
    found = whole_turns._again(seen, lambda: calls.append("slow"), 0, False)
    assert len(calls) == times and (found == 2.5) is not bool(times)
    whole_turns._again(seen, lambda: calls.append("last"), 1, False)
    assert calls.pop() == "last"
