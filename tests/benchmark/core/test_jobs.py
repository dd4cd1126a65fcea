from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oxytorch.benchmark.core import jobs
from oxytorch.benchmark.core.contest import no_progress
from oxytorch.benchmark.core.jobs import Settings, contest, single
from oxytorch.benchmark.core.processes import JobError, cause_of_death
from oxytorch.benchmark.models import runs

ALONE = Settings(peers=("eager",), rounds=1, threads=1, silence=120)
LSTM = {"model": "lstm", "dtype": "float32"}


def run_lstm(progress: Any, on_result: Any, settings: Settings = ALONE, **other: str) -> None:
    single("lstm", runs, settings, **{**LSTM, **other}).do(progress, on_result)


def no_results(result: dict[str, Any]) -> None:
    raise AssertionError(f"expected no result, got {result}")


def test_a_job_runs_in_a_process_of_its_own() -> None:
    stages: list[tuple[str, str]] = []
    results: list[dict[str, Any]] = []
    run_lstm(lambda peer, stage: stages.append((peer, stage)), results.append)
    [result] = results
    assert result["peers"][0]["status"] == "measured"
    assert result["allocation"] in ("reuse", "system")
    assert ("eager", "prepare") in stages


def test_an_error_in_the_process_carries_its_reason() -> None:
    with pytest.raises(JobError, match="KeyError: 'no such model'"):
        run_lstm(no_progress, no_results, model="no such model")


def test_silence_is_an_error() -> None:
    with pytest.raises(JobError, match="no sign of life for 0 s"):
        run_lstm(no_progress, no_results, replace(ALONE, silence=0.01))


def test_a_peer_that_kills_the_process_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def fake_run_once(
        module: str, settings: Settings, what: Any, progress: Any, on_result: Any
    ) -> None:
        asked.append(settings.peers)
        if "openvino" in settings.peers:
            raise JobError("killed by SIGSEGV", "openvino")
        on_result({"peers": []})

    monkeypatch.setattr(jobs, "run_once", fake_run_once)
    results: list[dict[str, Any]] = []
    labels = {"eager": "torch eager", "openvino": "OpenVINO"}
    contest("lstm", runs, ALONE, labels, **LSTM).do(no_progress, results.append)
    [result] = results
    assert asked == [("eager", "openvino"), ("eager",)]
    [record] = result["peers"]
    assert (record["peer"], record["label"]) == ("openvino", "OpenVINO")
    assert record["status"] == "failed"
    assert record["reason"] == "killed by SIGSEGV"


def test_a_death_that_belongs_to_no_peer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_run_once(*arguments: Any) -> None:
        raise JobError("killed by SIGKILL", "")

    monkeypatch.setattr(jobs, "run_once", fake_run_once)
    with pytest.raises(JobError, match="SIGKILL"):
        contest("lstm", runs, ALONE, {"eager": "torch eager"}).do(no_progress, no_results)


def test_cause_of_death_names_the_signal_and_the_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("first\nbus error in a kernel\n\n")
    text = cause_of_death(-signal.SIGBUS, log)
    assert text == "killed by SIGBUS; last line: bus error in a kernel"
