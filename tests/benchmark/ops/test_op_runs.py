from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import oxytorch
from oxytorch.benchmark.core.jobs import Settings
from oxytorch.benchmark.core.processes import JobError
from oxytorch.benchmark.machine.costs import measure_import_time, measure_optimize, model_bytes
from oxytorch.benchmark.machine.limits import BandwidthProbes, measure_limits
from oxytorch.benchmark.models.cases import ModelCase
from oxytorch.benchmark.ops.runs import run_op
from oxytorch.ops import Cost, Op, Sample

ONE_ROUND = Settings(peers=("eager", "oxytorch"), sizes=("cache", "memory"), rounds=1, threads=1)


def double(x: Tensor) -> Tensor:
    return x + x


def wrong(x: Tensor) -> Tensor:
    return x * 2.1


def make_op(function: Any) -> Op:
    def samples(dtype: torch.dtype, size: str) -> list[Sample]:
        return [Sample("64", (torch.ones(64, dtype=dtype),))]

    return Op(function, double, samples, lambda x: Cost(2 * x.nbytes, x.numel()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_op_is_measured_at_both_sizes(dtype: torch.dtype) -> None:
    cache, memory = run_op(make_op(double), dtype, ONE_ROUND, matrix_size=16)
    assert (cache["size"], memory["size"]) == ("cache", "memory")
    assert cache["read_write_bandwidth"] is None
    assert memory["read_write_bandwidth"]["median"] > 0
    for record in memory["peers"]:
        assert record["status"] == "measured"
        assert record["fraction_of_limit"]["median"] > 0
    assert memory["bytes"] == 2 * 64 * dtype.itemsize


def test_a_wrong_op_gets_no_speed() -> None:
    for result in run_op(make_op(wrong), torch.float32, ONE_ROUND, matrix_size=16):
        eager, ours = result["peers"]
        assert eager["status"] == "measured"
        assert ours["status"] == "wrong"
        assert "seconds" not in ours


def test_levels_are_separate_contestants() -> None:
    levels = [level.name for level in oxytorch.isa.levels() if level.supported][:2]
    if not levels:
        pytest.skip("the library is not built here, so there are no levels")
    settings = Settings(
        sizes=("cache",), peers=("oxytorch",), levels=tuple(levels), rounds=1, threads=1
    )
    op = oxytorch.ops.registry()["rms_norm"]
    [result] = run_op(op, torch.float32, settings, matrix_size=16)
    names = [record["peer"] for record in result["peers"]]
    assert names == ["eager", *(f"oxytorch {level}" for level in levels)]
    assert all(record["status"] == "measured" for record in result["peers"])


def test_limits_are_positive_rates() -> None:
    rates = measure_limits(1, rounds=1, traffic=1 << 16, matrix_size=32)
    assert set(rates) == {
        "read",
        "read_write",
        "matrix_product_float32",
        "matrix_product_bfloat16",
    }
    assert all(rate > 0 for values in rates.values() for rate in values)


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
