"""`benchmarks/programs.py`: who takes part, what the lines say, what is asked for."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import oxytorch
from oxytorch.benchmark.core import jobs as core_jobs
from oxytorch.benchmark.core.contest import new_record, no_progress, refuse
from oxytorch.benchmark.core.jobs import Settings
from oxytorch.benchmark.core.results import read_run
from oxytorch.benchmark.core.rounds import spread
from oxytorch.benchmark.models.cases import CASES, ModelCase
from oxytorch.benchmark.programs import runs, tables
from oxytorch.benchmark.report.pages import tables_of
from scripts import module_of

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "programs.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return module_of(SCRIPT)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_all_ways_are_right_and_take_turns(
    dtype: str, tiny_case: ModelCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oxytorch.rewriting.measure.TIMED", False)
    monkeypatch.setitem(runs.MODELS, "tiny", tiny_case)
    names = runs.contestants(dtype)
    settings = Settings(peers=tuple(names), rounds=2, threads=torch.get_num_threads())
    result = runs.run_job(no_progress, settings, "tiny", dtype, None)
    assert [record["peer"] for record in result["peers"]] == names
    assert {record["status"] for record in result["peers"]} == {"measured"}
    assert result["batch"] == tiny_case.batch
    assert tables.no_program(result) is None
    assert all(each is not None and each["count"] == 2 for each in tables.speeds(result))


class Remembers(nn.Module):
    """Keeps a state, so that there is no program of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.layer(x)
        return y


def test_a_model_without_a_program_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oxytorch.rewriting.measure.TIMED", False)
    x = torch.randn(2, 8)
    kept = oxytorch.optimize(Remembers().eval(), sample_input=x, graph=True)
    assert "keeps a state" in str(runs.why_none(kept))
    plain = nn.Sequential(nn.Linear(8, 8)).eval()
    program = oxytorch.optimize(plain, sample_input=x, graph=True)
    assert runs.why_none(program) is None


def test_a_program_that_was_timed_away_says_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    tune = importlib.import_module("oxytorch.optimize.tune")
    monkeypatch.setattr(tune, "_turns", lambda *_: [(1.0, 1e-3, 1.5e-3)])
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    kept = oxytorch.optimize(model, sample_input=torch.randn(2, 8), graph=True)
    assert "not used" in str(runs.why_none(kept))


def record_of(peer: str, *rounds: float, **notes: Any) -> Any:
    record = new_record(peer, runs.CONTESTANTS[peer].label)
    return {
        **record,
        "status": "measured",
        "rounds": [*rounds],
        "seconds": spread(rounds),
        "notes": notes,
    }


@pytest.fixture
def results() -> list[dict[str, Any]]:
    """Two models: the program of one is 1.25 times as fast as the sample's, the other has none."""
    first = [
        record_of("eager", 0.08, 0.08),
        record_of(runs.PASSES, 0.05, 0.05, optimize_seconds=1.0),
        record_of(runs.PROGRAM, 0.04, 0.04, optimize_seconds=2.0, no_program=None),
    ]
    second = [
        record_of("eager", 0.08, 0.08),
        record_of(runs.PASSES, 0.02, 0.02, optimize_seconds=1.0),
        record_of(runs.PROGRAM, 0.02, 0.02, optimize_seconds=1.0, no_program="draws numbers"),
    ]
    common = {"dtype": "float32", "batch": 1, "threads": 2}
    return [
        {"model": "one", "title": "One", **common, "peers": first},
        {"model": "two", "title": "Two", **common, "peers": second},
    ]


def test_tables_have_ratios_means_and_reasons(
    results: list[dict[str, Any]], head: dict[str, Any]
) -> None:
    [table] = tables_of({**head, "kind": "programs", "results": results})
    one, two, mean = table.rows
    assert one == ["One", "1", "80 ms", "50 ms", "1.60x", "40 ms", "2.00x", "1.25x", "1.0 / 2.0 s"]
    assert two[-3:] == ["4.00x", "1.00x", "1.0 / 1.0 s"]
    assert mean[4:8] == ["2.53x", "", "2.83x", "1.12x"]
    assert table.notes == ["No program of two batch 1: draws numbers."]


def test_a_failure_has_a_row_and_a_reason(results: list[dict[str, Any]]) -> None:
    refuse(results[1]["peers"][2], "wrong", "another number")
    [table] = tables.program_tables(results[1:])
    assert table.rows[0][5:8] == ["wrong", "-", "-"]
    assert table.notes[0] == "oxytorch, graph: wrong: another number."


def test_lines_come_at_once_and_the_file_after_each_model(
    results: list[dict[str, Any]],
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "programs.json"
    given = iter(results)

    def run_once(*arguments: Any) -> None:
        result = next(given, None)
        if result is None:
            raise KeyboardInterrupt
        arguments[-1](result)
        assert f"| {result['title']} |" in capsys.readouterr().out
        assert read_run(path)["results"][-1] == result

    monkeypatch.setattr(core_jobs, "run_once", run_once)
    with pytest.raises(KeyboardInterrupt):
        script.main(["bert", "swin", "vit", "--json", str(path)])
    assert (read_run(path)["done"], read_run(path)["left"]) == (
        ["bert float32", "swin float32"],
        ["vit float32"],
    )
    last = capsys.readouterr().out
    assert "geometric mean" in last and "No program of two batch 1: draws numbers." in last


def test_models_are_the_eight_or_those_named_or_all(script: ModuleType) -> None:
    def asked(*words: str) -> tuple[str, ...]:
        only: tuple[str, ...] = script.settings_of(script.parse(words)).only
        return only

    assert asked() == (*CASES,)
    assert asked("swin", "bert", "swin") == ("swin", "bert")
    assert asked("all") == (*runs.MODELS,) and set(CASES) < set(runs.MODELS)


@pytest.mark.parametrize("words", [["bort"], ["--dtype", "float16"], ["--batch", "0"]])
def test_what_is_unknown_is_an_error(
    words: list[str], script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.parse(words)
    assert words[-1] in capsys.readouterr().err
