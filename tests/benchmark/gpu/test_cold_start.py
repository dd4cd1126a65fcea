"""First steps of fresh processes, on the processor."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from oxytorch.benchmark.gpu import cold_start
from oxytorch.benchmark.gpu.cold_start import CACHES, STAGES, WAYS, Way, measure_way
from oxytorch.benchmark.optim.cases import Case
from oxytorch.benchmark.report.pages import tables_of

TINY = Case("tiny", "Two tensors", lambda: [(8, 7), (9,)])


def test_stages_of_a_process_are_told() -> None:
    result = measure_way(WAYS["oxytorch"], TINY, "cpu", 1, 120)
    assert result["status"] == "measured", result
    seconds = {stage: result[f"{stage}_seconds"]["median"] for stage in STAGES}
    assert 0 < seconds["imported"] < seconds["device_up"] < seconds["done"]
    made = seconds["done"] - seconds["device_up"]
    assert seconds["making"] + seconds["first_step"] == pytest.approx(made)
    [table] = tables_of({"kind": "cold-start", "results": [result]})
    assert table.rows[0][:2] == ["oxytorch", "hidden"]


def test_a_way_that_is_not_installed_is_absent() -> None:
    way = Way("optimi", "torch-optimi", "no_such_module_anywhere")
    result = measure_way(way, TINY, "cpu", 1, 120)
    assert (result["status"], result["reason"]) == (
        "absent",
        "no_such_module_anywhere is not installed",
    )


def test_a_process_that_fails_is_told_with_its_last_line() -> None:
    result = measure_way(Way("no such way", "?"), TINY, "cpu", 1, 120)
    assert result["status"] == "failed"
    assert "unexpected keyword argument" in result["reason"]


def test_a_process_that_takes_too_long_is_given_up() -> None:
    result = measure_way(WAYS["oxytorch"], TINY, "cpu", 1, 0.1)
    assert (result["status"], result["reason"]) == ("failed", "not done after 0 s")


def test_weights_that_did_not_move_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    still = {**dict.fromkeys(STAGES, 1.0), "least_moved": 0.0, "most_moved": 0.002}
    monkeypatch.setattr(cold_start, "_run", lambda *arguments: {**still, "log": [], "device": ""})
    assert measure_way(WAYS["fused"], TINY, "cpu", 1, 1)["status"] == "wrong"


def test_caches_are_empty_and_the_compiler_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(command: Any, *, env: dict[str, str], **options: Any) -> Any:
        seen.update(env)
        seen["compiler"] = shutil.which("cc", path=env["PATH"])
        raise cold_start.subprocess.TimeoutExpired(command, 1)

    monkeypatch.setenv("CC", "/usr/bin/cc")
    monkeypatch.setattr(cold_start.subprocess, "run", run)
    measure_way(WAYS["oxytorch driver"], TINY, "cpu", 1, 1)
    assert seen["OXYTORCH_GPU"] == "jit"
    assert seen["compiler"] is None and "CC" not in seen
    assert len({seen[variable] for variable in CACHES}) == len(CACHES)
