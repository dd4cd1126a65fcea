"""Runs that are cut off keep what they have, and go on."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import run_command

from oxytorch import config
from oxytorch.benchmark.core.jobs import Job, Settings
from oxytorch.benchmark.core.kept import keeping, reopened
from oxytorch.benchmark.core.processes import JobError
from oxytorch.benchmark.core.results import read_run
from oxytorch.benchmark.report.pages import merge, provenance
from oxytorch.benchmark.subjects import SUBJECTS
from oxytorch.core import whole_file


@pytest.fixture
def run(head: dict[str, Any]) -> dict[str, Any]:
    """The head of a run of models."""
    return {**copy.deepcopy(head), "kind": "models", "command": "oxytorch bench models"}


def result(model: str, seconds: float = 1.0) -> dict[str, Any]:
    return {"model": model, "dtype": "float32", "batch": 1, "seconds": seconds}


def test_every_step_is_in_the_file(run: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "folder" / "run.json"
    with keeping(run, ["a", "b", "c"], [path]) as measured:
        assert read_run(path)["left"] == ["a", "b", "c"]
        measured.add(result("a"))
        assert read_run(path)["results"] == [result("a")]
        measured.finish("a")
        assert (read_run(path)["done"], read_run(path)["left"]) == (["a"], ["b", "c"])
        measured.fail("b", "no such peer")
        assert read_run(path)["failures"] == [{"job": "b", "reason": "no such peer"}]
        assert measured.left() == ["c"]
        measured.finish("c")
    assert read_run(path)["left"] == []
    assert [file.name for file in path.parent.iterdir()] == ["run.json"]


def test_a_result_replaces_one_of_the_same_thing(run: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with keeping(run, ["a"], [path]) as measured:
        measured.add(result("a", 1.0))
        measured.add(result("b", 2.0))
        measured.add(result("a", 3.0))
    assert read_run(path)["results"] == [result("a", 3.0), result("b", 2.0)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_cuts_a_run_off_is_told_with_what_is_kept(
    error: type[BaseException],
    run: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(error), keeping(run, ["a", "b"], [path]) as measured:
        measured.add(result("a"))
        measured.finish("a")
        raise error
    told = capsys.readouterr().err
    assert f"{path} keeps 1 results, 1 of 2 jobs; go on with: oxytorch bench continue" in told
    assert "incomplete, not measured: b" in provenance(read_run(path))


def test_a_failed_write_leaves_the_old_file(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    with keeping(run, ["a"], [path]) as measured:
        before = path.read_text()

        def full(*arguments: Any) -> None:
            raise OSError("no space left")

        monkeypatch.setattr(whole_file.os, "replace", full)
        with pytest.raises(OSError, match="no space"):
            measured.add(result("a"))
        monkeypatch.undo()
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_jobs_have_different_names(run: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="different names"), keeping(run, ["a", "a"], []):
        pass


def test_parts_of_a_run_make_a_whole_one(run: dict[str, Any]) -> None:
    first = {**run, "results": [result("a")], "done": ["a"], "left": ["b"]}
    second = {**run, "date": "2999-01-01", "results": [result("b")], "done": ["b"], "left": []}
    [kinds] = merge([first, second]).values()
    assert kinds["models"]["left"] == []
    assert "incomplete" not in provenance(kinds["models"])
    [kinds] = merge([first]).values()
    assert "incomplete, not measured: b" in provenance(kinds["models"])


def jobs_of(names: list[str], measured: list[str], stops_at: str = "") -> Any:
    """A plan of jobs that note that they ran; one of them is cut off after its result."""

    def job(name: str) -> Job:
        def do(progress: Any, on_result: Any) -> None:
            measured.append(name)
            on_result(result(name, float(len(measured))))
            if name == stops_at:
                raise KeyboardInterrupt

        return Job(name, do)

    jobs = [job(name) for name in names]
    return replace(SUBJECTS["models"], jobs=lambda settings: jobs)


def test_a_run_goes_on_where_it_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []
    path = tmp_path / "run.json"
    words = ["models", "--only", "bert", "--rounds", "3", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["oxytorch", "bench", *words])
    monkeypatch.setitem(SUBJECTS, "models", jobs_of(["a", "b", "c"], measured, "b"))
    monkeypatch.setattr("oxytorch.benchmark.command.show_run", lambda run: None)
    with pytest.raises(KeyboardInterrupt):
        run_command(*words)
    cut_off = read_run(path)
    assert (cut_off["done"], cut_off["left"]) == (["a"], ["b", "c"])
    assert len(cut_off["results"]) == 2

    monkeypatch.setitem(SUBJECTS, "models", jobs_of(["a", "b", "c"], measured))
    assert run_command("continue", str(path)) == 0
    assert measured == ["a", "b", "b", "c"]
    told = capsys.readouterr().err
    assert "has 2 results; done: a; left: b, c" in told
    whole = read_run(path)
    assert (whole["done"], whole["left"]) == (["a", "b", "c"], [])
    assert [entry["model"] for entry in whole["results"]] == ["a", "b", "c"]
    assert len(whole["continued"]) == 1

    assert run_command("continue", str(path)) == 2
    assert "is complete" in capsys.readouterr().err


def test_only_the_same_run_goes_on(run: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(FileNotFoundError, match="does not exist"):
        reopened(path)
    run["versions"]["torch"] = "1.0"
    with keeping(run, ["a"], [path]):
        pass
    with pytest.raises(ValueError, match=r"but torch was 1.0 and is "):
        reopened(path)


def test_results_are_kept_where_no_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(config, "current", config.Config(cache_home=str(tmp_path)))
    monkeypatch.setitem(SUBJECTS, "models", jobs_of(["a"], []))
    monkeypatch.setattr("oxytorch.benchmark.command.show_run", lambda run: None)
    assert run_command("models", "--rounds", "1") == 0
    [path] = (tmp_path / "oxytorch" / "bench").iterdir()
    assert read_run(path)["results"] == [result("a")]
    assert f"results go to {path} as they come" in capsys.readouterr().err


def test_a_job_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(progress: Any, on_result: Any) -> None:
        raise JobError("killed by SIGSEGV", "")

    subject = jobs_of(["b"], [])
    jobs = [Job("a", fail), *subject.jobs(Settings(rounds=1, threads=1))]
    monkeypatch.setitem(SUBJECTS, "models", replace(subject, jobs=lambda settings: jobs))
    monkeypatch.setattr("oxytorch.benchmark.command.show_run", lambda run: None)
    path = tmp_path / "run.json"
    assert run_command("models", "--json", str(path)) == 1
    assert read_run(path)["failures"] == [{"job": "a", "reason": "killed by SIGSEGV"}]
    assert read_run(path)["done"] == ["a", "b"]


def _is_gone(group: int, seconds: float = 20.0) -> bool:
    """Whether no process of a group is left; one that has ended may wait to be collected."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_ended_leaves_a_valid_file(number: int, tmp_path: Path) -> None:
    """A real run of real jobs in processes of their own, of which none stays behind."""
    path = tmp_path / "run.json"
    words = ["ops", "--only", "rms_norm,layer_norm,softmax", "--peers", "eager"]
    words += ["--dtype", "float32", "--size", "cache", "--rounds", "2", "--json", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "oxytorch", "bench", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A run that was started in the background may ignore it, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        deadline = time.monotonic() + 240
        while not (path.exists() and json.loads(path.read_text())["results"]):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    run = read_run(path)
    assert run["results"] and run["left"]
    assert all("peers" in entry for entry in run["results"])
    if number == signal.SIGKILL:
        os.killpg(process.pid, signal.SIGKILL)  # its worker, which nobody could end
        return
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number], told
    assert f"{path} keeps" in told and f"oxytorch bench continue {path}" in told
    assert _is_gone(process.pid)
