from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from oxytorch.benchmark.core import jobs
from oxytorch.benchmark.core.contest import no_progress
from oxytorch.benchmark.core.jobs import Settings
from oxytorch.benchmark.core.processes import JobError
from oxytorch.benchmark.optim import runs as optim_runs
from oxytorch.benchmark.optim.cases import FORMATS, OPTIMIZERS, Case, bert_shapes
from oxytorch.benchmark.optim.contestants import PEERS, Entrant
from oxytorch.benchmark.optim.runs import check, run_optimizer

TINY = Case("tiny", "Two tensors", lambda: [(80, 70), (9,)])
ELEMENTS = 80 * 70 + 9


def measure(optimizer: str, *peers: str, formats: tuple[str, ...] = ("float32",)) -> dict[str, Any]:
    settings = Settings(peers=peers, formats=formats, rounds=2, threads=torch.get_num_threads())
    return run_optimizer(optimizer, TINY, settings, probe_bytes=1 << 16)


def records(result: dict[str, Any]) -> dict[str, Any]:
    return {record["peer"]: record for record in result["peers"]}


def test_bert_base_has_its_parameters() -> None:
    shapes = bert_shapes()
    assert len(shapes) == 199
    assert sum(torch.Size(shape).numel() for shape in shapes) == 109_482_240


def test_every_contestant_of_adamw_is_measured() -> None:
    result = measure("AdamW", *PEERS, formats=tuple(FORMATS))
    found = records(result)
    if importlib.util.find_spec("intel_extension_for_pytorch") is None:
        assert found.pop("predecessor")["status"] == "absent"
    assert {name: record["status"] for name, record in found.items()} == dict.fromkeys(
        found, "measured"
    )
    assert result["base"] == "fused" and found["fused"]["speedup"]["median"] == 1.0
    assert result["parameters"] == ELEMENTS and result["tensors"] == 2
    for record in found.values():
        assert record["seconds"]["median"] > 0
        assert record["fraction_of_limit"]["median"] > 0
        assert record["time_over_base"]["count"] == 2


def test_bytes_are_those_that_a_step_has_to_move() -> None:
    found = records(measure("AdamW", "fused", "oxytorch", formats=("float32", "split")))
    for name in ("fused", "oxytorch"):
        assert found[name]["bytes_per_parameter"] == 12
        assert found[name]["bytes"] == 28 * ELEMENTS
    # A split parameter and its lower half take 4 bytes, a bfloat16 gradient takes 2.
    assert found["oxytorch split"]["bytes_per_parameter"] == 12
    assert found["oxytorch split"]["bytes"] == 26 * ELEMENTS


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_that_change_the_right_things_are_measured(optimizer: str) -> None:
    found = records(measure(optimizer, "foreach", "fused", "oxytorch", formats=("float32",)))
    for record in found.values():
        assert record["status"] in ("measured", "absent"), record
    if hasattr(torch.optim, optimizer):
        assert found["foreach"]["status"] == "measured"
    else:
        assert found["foreach"]["reason"] == f"torch has no {optimizer}"


def test_a_wrong_step_gets_no_speed() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0101, momentum=0.9)

    expected = optim_runs.expected_change("SGD")
    record = check(Entrant("fused", "torch fused", "float32", make), expected)
    assert record["status"] == "wrong"
    assert "change differs by 0.01 > 0.0001 allowed" in record["reason"]


def test_nan_is_wrong() -> None:
    def make(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=float("nan"))

    expected = optim_runs.expected_change("SGD")
    record = check(Entrant("fused", "torch fused", "float32", make), expected)
    assert record["status"] == "wrong"


def test_a_contestant_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_run_once(
        module: str, settings: Settings, what: Any, progress: Any, on_result: Any
    ) -> None:
        if "predecessor" in settings.peers:
            raise JobError("killed by SIGILL", "predecessor")
        on_result({"peers": []})

    monkeypatch.setattr(jobs, "run_once", fake_run_once)
    labels = {name: PEERS[name] for name in ("fused", "predecessor")}
    job = jobs.contest("AdamW", optim_runs, Settings(rounds=1, threads=1), labels)
    results: list[dict[str, Any]] = []
    job.do(no_progress, results.append)
    [result] = results
    [record] = result["peers"]
    assert (record["label"], record["reason"]) == ("predecessor", "killed by SIGILL")
