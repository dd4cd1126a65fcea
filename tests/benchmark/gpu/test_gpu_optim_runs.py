"""Steps on a GPU, run here on the processor where the GPU's part does not matter."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import pytest
import torch

from oxytorch.benchmark import command
from oxytorch.benchmark.core.jobs import Settings
from oxytorch.benchmark.gpu import runs as gpu_optim_runs
from oxytorch.benchmark.gpu.cases import CASES, llama_shapes, resnet50_shapes
from oxytorch.benchmark.gpu.clocks import Clock
from oxytorch.benchmark.gpu.contestants import PEERS
from oxytorch.benchmark.gpu.runs import run_case
from oxytorch.benchmark.optim.cases import Case
from oxytorch.benchmark.report.pages import tables_of

TINY = Case("tiny", "Two tensors", lambda: [(80, 70), (9,)])
ELEMENTS = 80 * 70 + 9


def measure(optimizer: str, *peers: str, formats: tuple[str, ...] = ("float32",)) -> dict[str, Any]:
    settings = Settings(only=(optimizer,), peers=peers, formats=formats, rounds=2, threads=1)
    [result] = run_case(TINY, settings, HostClock())
    return result


class HostClock:
    """As `Clock`, of a device that does what it is asked at once: the processor."""

    device = torch.device("cpu")

    def device_name(self) -> str:
        return "processor"

    def synchronize(self) -> None:
        return

    def on_host(self, call: Any) -> float:
        return self.on_device(call, 1, 0)

    def on_device(self, call: Any, count: int, host_seconds: float) -> float:
        began = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - began) / count

    def allocated(self) -> None:
        return None


@pytest.fixture(autouse=True)
def _small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_optim_runs, "PROBE_BYTES", 1 << 16)


def records(result: dict[str, Any]) -> dict[str, Any]:
    return {record["peer"]: record for record in result["peers"]}


@pytest.mark.parametrize(
    ("shapes", "tensors", "elements"),
    [(llama_shapes(), 147, 953_223_168), (resnet50_shapes(), 146, 22_770_920)],
    ids=["llama", "resnet50"],
)
def test_sets_have_their_tensors(shapes: Any, tensors: int, elements: int) -> None:
    assert len(shapes) == tensors
    assert sum(torch.Size(shape).numel() for shape in shapes) == elements


def test_steps_are_timed_and_states_are_counted() -> None:
    result = measure("AdamW", "foreach", "fused", "oxytorch", formats=("float32", "split"))
    found = records(result)
    assert set(found) == {"foreach", "fused", "fused bfloat16", "oxytorch", "oxytorch split"}
    assert {record["status"] for record in found.values()} == {"measured"}
    assert result["base"] == "fused" and found["fused"]["speedup"]["median"] == 1
    assert found["oxytorch"]["state_bytes_per_parameter"] == 8
    # Two states of float32 and the lower half.
    assert found["oxytorch split"]["state_bytes_per_parameter"] == 10
    assert found["oxytorch split"]["bytes"] == 26 * ELEMENTS
    assert found["fused"]["bytes"] == 28 * ELEMENTS
    for record in found.values():
        for name in ("seconds", "host_seconds", "fraction_of_limit", "copy_bandwidth"):
            assert record[name]["count"] == 2 and record[name]["median"] > 0
        assert record["first_step_seconds"] > 0


@pytest.mark.slow
def test_peers_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = records(measure("AdamW", "optimi", "bitsandbytes", "flashoptim"))
    assert {record["status"] for record in found.values()} == {"absent"}
    assert found["optimi"]["reason"] == "optimi is not installed (pip install torch-optimi)"


def test_a_peer_that_fails_while_it_is_timed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu_optim_runs, "_measure", fail)
    [record] = measure("SGD", "foreach")["peers"]
    assert (record["status"], record["reason"]) == ("failed", "RuntimeError: out of memory")


def test_a_peer_takes_part_only_with_optimizers_it_has() -> None:
    assert records(measure("Lamb", *PEERS)).keys() == {"oxytorch"}


@pytest.mark.slow
def test_the_table_has_a_row_per_contestant() -> None:
    result = measure("SGD", "foreach", "fused", "oxytorch")
    [table] = tables_of({"kind": "gpu-optim", "results": [result]})
    measured = [record for record in result["peers"] if record["status"] == "measured"]
    assert [row[1] for row in table.rows] == [record["label"] for record in measured]
    assert table.rows[0][2] == "4.00 bytes"
    assert sum("**" in row[3] for row in table.rows) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
@pytest.mark.parametrize("what", ["gpu-optim", "cold-start"])
def test_without_a_gpu_the_command_says_so(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(command._parse([what])) == 2
    assert f"bench {what}: expected a CUDA device, found none" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_time_on_the_device_is_that_of_its_kernels() -> None:
    clock = Clock()
    x = torch.zeros(1 << 28, device="cuda")
    clock.on_device(lambda: x.neg_(), 1, 1.0)  # the first call loads the kernel
    [alone, many] = [clock.on_device(lambda: x.neg_(), count, 1e-4) for count in (1, 20)]
    assert many == pytest.approx(alone, rel=0.3)
    assert 1e-5 < many < 1e-1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_on_the_gpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_optim_runs, "PROBE_BYTES", 1 << 26)
    settings = Settings(only=("AdamW",), peers=("fused",), rounds=3, threads=1)
    [result] = run_case(CASES["resnet50"], settings, Clock())
    record = records(result)["fused"]
    assert record["status"] == "measured", record
    assert record["state_bytes_per_parameter"] == pytest.approx(8, rel=0.05)
    assert 0 < record["fraction_of_limit"]["median"] < 1.2


def test_every_peer_has_a_place_in_the_plot() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    from oxytorch.benchmark.report.plots import COLORS

    assert set(PEERS) <= set(COLORS)
