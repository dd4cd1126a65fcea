from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from oxytorch.benchmark.core.processes import JobError
from oxytorch.benchmark.machine.costs import measure_import_time, measure_optimize, model_bytes
from oxytorch.benchmark.machine.limits import BandwidthProbes, Probe, best_rates, measure_limits
from oxytorch.benchmark.models.cases import ModelCase


def test_limits_are_positive_rates() -> None:
    rates = measure_limits(1, rounds=1, traffic=1 << 16, matrix_size=32)
    assert set(rates) == {
        "read",
        "read_write",
        "matrix_product_float32",
        "matrix_product_bfloat16",
    }
    assert all(rate > 0 for values in rates.values() for rate in values)


def test_the_best_probe_of_each_round_counts() -> None:
    probes = {"slow": Probe(int, 2.0), "fast": Probe(int, 4.0)}
    assert best_rates(probes, {"slow": [1.0, 0.5], "fast": [1.0, 2.0]}) == [4.0, 4.0]
    assert best_rates({}, {"eager": [1.0]}) == []


@pytest.mark.parametrize("threads", [1, 3])
def test_the_probe_copies_the_whole_buffer(threads: int) -> None:
    probes = BandwidthProbes(8 * 1001, threads)
    copies = [probe.call() for probe in probes.read_write().values()]
    probes.close()
    assert torch.equal(copies[0], copies[1])  # type: ignore[arg-type]


def test_model_bytes_counts_shared_weights_once() -> None:
    first = torch.nn.Linear(4, 4, bias=False)
    second = torch.nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    assert model_bytes(torch.nn.Sequential(first, second)) == 64


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_optimize_cost_is_counted(tiny_case: ModelCase) -> None:
    cost = measure_optimize(tiny_case, torch.float32, inplace=False)
    assert cost["seconds"] > 0
    assert cost["model_bytes"] == (8 * 16 + 16 + 16 * 4 + 4) * 4
    assert cost["peak_growth_bytes"] >= 0


def test_import_time_is_measured_in_fresh_processes() -> None:
    cost = measure_import_time(processes=1)
    assert 0 < cost["added_seconds"] < cost["torch_seconds"]


def test_a_failing_import_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **keywords: Any) -> Any:
        return subprocess.CompletedProcess([], 1, stdout="", stderr="trace\nImportError: no\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(JobError, match="ImportError: no"):
        measure_import_time(processes=1)
