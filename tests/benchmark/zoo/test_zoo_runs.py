"""`oxytorch bench zoo`: who takes part, what counts as lost, and the options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from commands import parse, run_command
from torch import nn

import oxytorch
from oxytorch.benchmark import command
from oxytorch.benchmark.core import jobs as core_jobs
from oxytorch.benchmark.core.contest import new_record, no_progress, refuse
from oxytorch.benchmark.core.jobs import Settings
from oxytorch.benchmark.core.rounds import spread
from oxytorch.benchmark.models.cases import ModelCase, call_model, output_tensors
from oxytorch.benchmark.report.pages import merge, tables_of
from oxytorch.benchmark.zoo import runs as zoo_runs
from oxytorch.benchmark.zoo import tables
from oxytorch.benchmark.zoo.cases import ZOO
from oxytorch.benchmark.zoo.jobs import SUBJECT
from oxytorch.benchmark.zoo.tables import lost


def measure(case: ModelCase, dtype: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(ZOO, case.name, case)
    settings = Settings(
        peers=tuple(zoo_runs.contestants(dtype)), rounds=2, threads=torch.get_num_threads()
    )
    return zoo_runs.run_job(no_progress, settings, case.name, dtype, batch=2)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_all_ways_are_timed_beside_each_other(
    tiny_case: ModelCase, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = measure(tiny_case, dtype, monkeypatch)
    records = {record["peer"]: record for record in result["peers"]}
    stock = ["eager"] if dtype == "float32" else ["eager", "eager_cast", "float32"]
    assert [*records] == [*stock, "oxytorch", "oxytorch_sample"]
    assert {record["status"] for record in records.values()} == {"measured"}, records
    assert all(len(record["rounds"]) == 2 for record in records.values())
    assert result["batch"] == 2
    assert result["level"] == str(oxytorch.isa.active())


@pytest.mark.slow
def test_autocast_that_fails_is_the_result_of_autocast_alone(
    tiny_case: ModelCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_autocast(module: nn.Module, args: Any) -> None:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("overflow")

    def build(batch: int) -> Any:
        model, inputs = tiny_case.build(batch)
        model.register_forward_pre_hook(no_autocast)
        return model, inputs

    result = measure(replace(tiny_case, build=build), "bfloat16", monkeypatch)
    records = {record["peer"]: record for record in result["peers"]}
    assert records["eager"]["status"] == "failed" and "overflow" in records["eager"]["reason"]
    others = [record for name, record in records.items() if name != "eager"]
    assert {record["status"] for record in others} == {"measured"}
    assert all("speedup" not in record for record in others)
    monkeypatch.setattr(tables, "LOSS", 0.0)
    assert lost(result) == []
    assert "failed: RuntimeError: overflow" in str(tables.zoo_tables([result])[0].notes)


@pytest.mark.slow
def test_an_optimize_that_fails_is_a_loss(
    tiny_case: ModelCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_to(model: nn.Module, **given: Any) -> nn.Module:
        if "sample_input" in given:
            raise RuntimeError("no such layer")
        return model

    monkeypatch.setattr(oxytorch, "optimize", refuse_to)
    result = measure(tiny_case, "float32", monkeypatch)
    monkeypatch.setattr(tables, "LOSS", 0.0)
    assert lost(result) == [
        "tiny float32 batch 2, oxytorch, sample_input: failed: RuntimeError: no such layer"
    ]


def record_of(peer: str, *rounds: float) -> Any:
    record = new_record(peer, zoo_runs.CONTESTANTS[peer].label)
    record["status"] = "measured"
    record["rounds"] = list(rounds)
    record["seconds"] = spread(rounds)
    return record


@pytest.fixture
def zoo_run(head: dict[str, Any]) -> dict[str, Any]:
    """One model in bfloat16: slower than the cast model with a sample, and wrong without."""
    wrong = new_record("oxytorch", "oxytorch")
    refuse(wrong, "wrong", "relative difference 1 > 0.02 allowed")
    result = {
        "model": "tiny",
        "title": "Tiny",
        "dtype": "bfloat16",
        "batch": 8,
        "threads": 2,
        "level": "avx2",
        "peers": [
            record_of("eager", 0.05, 0.05, 0.05),
            record_of("eager_cast", 0.02, 0.03, 0.04),
            record_of("float32", 0.04, 0.04, 0.04),
            wrong,
            record_of("oxytorch_sample", 0.025, 0.04, 0.05),
        ],
    }
    return {**head, "kind": "zoo", "results": [result]}


def test_losses_are_against_the_fastest_stock_way_round_by_round(zoo_run: dict[str, Any]) -> None:
    first, second = lost(zoo_run["results"][0])
    assert first == "tiny bfloat16 batch 8, oxytorch: wrong: relative difference 1 > 0.02 allowed"
    assert second.startswith("tiny bfloat16 batch 8, oxytorch, sample_input: 0.80x (0.75 to 0.80)")
    assert second.endswith("of torch, cast: 40 ms, 30 ms")


def test_tables_have_every_way_and_every_loss(zoo_run: dict[str, Any]) -> None:
    table, losses = tables_of(zoo_run)
    [row, mean] = table.rows
    assert row == ["Tiny", "8", "50 ms", "30 ms", "40 ms", "wrong", "-", "40 ms", "0.80x"]
    assert mean[-3:] == ["-", "", "0.80x"]
    assert len(losses.rows) == 2
    zoo_run["results"][0]["peers"][3:] = [record_of("oxytorch", 0.01, 0.01, 0.01)]
    assert tables_of(zoo_run)[-1].rows == [["none"]]


def test_levels_are_kept_apart(zoo_run: dict[str, Any]) -> None:
    other = {**zoo_run, "results": [{**zoo_run["results"][0], "level": "avx512"}]}
    [kinds] = merge([zoo_run, other]).values()
    assert len(kinds["zoo"]["results"]) == 2


def test_every_model_dtype_and_batch_is_a_job() -> None:
    settings = command._settings(
        parse("zoo", "--models", "bert,swin", "--batch", "1,4", "--threads", "2")
    )
    assert [job.name for job in SUBJECT.jobs(settings)] == [
        f"{model} {dtype} batch {batch}"
        for model in ("bert", "swin")
        for batch in (1, 4)
        for dtype in ("float32", "bfloat16")
    ]
    defaults = command._settings(parse("zoo"))
    assert len(SUBJECT.jobs(defaults)) == len(ZOO) * 4


def test_unknown_models_and_batches_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("zoo", "--models", "bort") == 2
    assert "--models: unknown name 'bort'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse("zoo", "--batch", "0")
    assert "expected an integer above 0, got '0'" in capsys.readouterr().err


def test_losses_are_told_as_they_come(
    zoo_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_once(*arguments: Any) -> None:
        on_result = arguments[-1]
        on_result(zoo_run["results"][0])

    monkeypatch.setattr(core_jobs, "run_once", run_once)
    settings = Settings(only=("bert",), dtypes=("bfloat16",), rounds=1, threads=1, batches=(1,))
    [job] = SUBJECT.jobs(settings)
    kept: list[Any] = []
    job.do(no_progress, kept.append)
    assert kept == zoo_run["results"]
    assert capsys.readouterr().err.count("oxytorch bench: lost: tiny bfloat16 batch 8") == 2


def test_the_zoo_has_forty_models_of_many_kinds() -> None:
    assert len(ZOO) >= 40
    assert all(name == case.name for name, case in ZOO.items())


@pytest.mark.parametrize("name", ["electra", "mobilenet_v2", "unet", "tcn"])
def test_builds_are_seeded_and_finite(name: str) -> None:
    (first, inputs), (second, others) = ZOO[name].build(1), ZOO[name].build(1)
    assert not any(module.training for module in first.modules())
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)
    with torch.no_grad():
        one = output_tensors(call_model(first, inputs))
        torch.testing.assert_close(one, output_tensors(call_model(second, others)))
    assert all(bool(tensor.isfinite().all()) for tensor in one)
