"""Advice: the setting that reserves least, with the numbers."""

from __future__ import annotations

from pathlib import Path

import made_traces
import pytest

from oxytorch.memory import trace as traces
from oxytorch.memory.advise import SETTINGS, WORTH, advise
from oxytorch.memory.trace import Trace

DATA = Path(__file__).parent / "data"


def test_setting_that_reserves_least_is_named_with_its_numbers() -> None:
    trace = traces.load(DATA / "mixture_of_experts.trace")
    found = advise(trace)
    assert found.setting == "expandable_segments:True"
    assert found.ours
    text = "\n".join(found.reasons)
    assert "torch's default reserves 17.74 GiB: 22.5% of it wasted, 512 driver calls" in text
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True reserves 14.40 GiB" in text
    assert "oxytorch's allocator reserves" in text
    stock = found.results[: len(SETTINGS)]
    best = next(each for each in stock if each.allocator == found.setting)
    assert best.peak_reserved * (1 - WORTH) <= min(each.peak_reserved for each in stock)


def test_defaults_stay_where_nothing_is_to_be_gained() -> None:
    trace = Trace()
    for _ in range(10):
        trace.alloc(100 << 20)
    found = advise(trace)
    assert (found.setting, found.ours) == ("", False)


def test_setting_that_does_not_fit_is_not_advised() -> None:
    trace = made_traces.training()
    found = advise(trace, limit=int(1.02 * traces.peak(trace).allocated))
    assert found.fits
    assert found.results[0].failed is not None
    assert found.setting == "expandable_segments:True"
    assert any(reason.startswith("torch's default runs out of") for reason in found.reasons)


def test_program_that_fits_nowhere_is_said_to() -> None:
    trace = made_traces.training(steps=2)
    found = advise(trace, limit=traces.peak(trace).allocated // 2)
    assert (found.fits, found.setting, found.ours) == (False, "", False)
    assert "none of the settings of PYTORCH_ALLOC_CONF that were tried fits" in found.reasons


@pytest.mark.parametrize("limit", [None, 3 << 30])
def test_every_candidate_is_among_the_numbers(limit) -> None:
    names = [each.allocator for each in advise(made_traces.training(steps=2), limit).results]
    assert names[: len(SETTINGS)] == [*SETTINGS]
    assert names[-2:] == ["oxytorch", "offline-bound"]
    assert ("garbage_collection_threshold:0.8" in names) == (limit is not None)
