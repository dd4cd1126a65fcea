from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from oxytorch.benchmark.core import jobs
from oxytorch.benchmark.core.contest import no_progress
from oxytorch.benchmark.core.jobs import JobError, run_contest, run_once

LSTM = {
    "kind": "model",
    "model": "lstm",
    "dtype": "float32",
    "peers": ["eager"],
    "batch": 1,
    "rounds": 1,
    "threads": 1,
    "allocation": "reuse",
}


def no_results(result: dict[str, Any]) -> None:
    raise AssertionError(f"expected no result, got {result}")


def test_a_job_runs_in_a_process_of_its_own() -> None:
    stages: list[tuple[str, str]] = []
    results: list[dict[str, Any]] = []
    run_once(LSTM, 120, lambda peer, stage: stages.append((peer, stage)), results.append)
    [result] = results
    assert result["peers"][0]["status"] == "measured"
    assert result["allocation"] in ("reuse", "system")
    assert ("eager", "prepare") in stages


def test_an_error_in_the_process_carries_its_reason() -> None:
    with pytest.raises(JobError, match="KeyError: 'no such model'"):
        run_once({**LSTM, "model": "no such model"}, 120, no_progress, no_results)


def test_silence_is_an_error() -> None:
    with pytest.raises(JobError, match="no sign of life for 0 s"):
        run_once(LSTM, 0.01, no_progress, no_results)


def test_a_peer_that_kills_the_process_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def fake_run_once(job: dict[str, Any], silence: float, progress: Any, on_result: Any) -> None:
        asked.append(job["peers"])
        if "openvino" in job["peers"]:
            raise JobError("killed by SIGSEGV", "openvino")
        on_result({"peers": []})

    monkeypatch.setattr(jobs, "run_once", fake_run_once)
    results: list[dict[str, Any]] = []
    run_contest({**LSTM, "peers": ["eager", "openvino"]}, 1, no_progress, results.append)
    [result] = results
    assert asked == [["eager", "openvino"], ["eager"]]
    [record] = result["peers"]
    assert (record["peer"], record["status"]) == ("openvino", "failed")
    assert record["reason"] == "killed by SIGSEGV"


def test_a_death_that_belongs_to_no_peer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_run_once(job: dict[str, Any], silence: float, progress: Any, on_result: Any) -> None:
        raise JobError("killed by SIGKILL", "")

    monkeypatch.setattr(jobs, "run_once", fake_run_once)
    with pytest.raises(JobError, match="SIGKILL"):
        run_contest(LSTM, 1, no_progress, no_results)


def test_cause_of_death_names_the_signal_and_the_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("first\nbus error in a kernel\n\n")
    text = jobs.cause_of_death(-signal.SIGBUS, log)
    assert text == "killed by SIGBUS; last line: bus error in a kernel"
