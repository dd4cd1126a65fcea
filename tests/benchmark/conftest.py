"""Small models and made-up results for the benchmark's tests."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oxytorch.benchmark.core.contest import new_record, refuse
from oxytorch.benchmark.core.results import new_run
from oxytorch.benchmark.core.rounds import spread
from oxytorch.benchmark.models.cases import ModelCase


class TwoOutputs(nn.Module):
    """A model called with keywords that returns a dictionary, as `transformers` models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.first(x))
        return {"scores": self.second(hidden) * scale, "hidden": hidden}


def _build(batch: int) -> Any:
    torch.manual_seed(0)
    return TwoOutputs().eval(), {"x": torch.randn(batch, 8), "scale": torch.ones(1)}


@pytest.fixture
def tiny_case() -> ModelCase:
    return ModelCase("tiny", "Two linear layers", 3, _build)


def _peer(name: str, seconds: float, eager: float) -> Any:
    record = new_record(name, {"eager": "torch eager"}.get(name, name))
    record["status"] = "measured"
    record["seconds"] = spread([seconds])
    record["speedup"] = spread([eager / seconds])
    record["fraction_of_limit"] = spread([0.5])
    record["prepare_seconds"] = 1.5
    return record


@pytest.fixture(scope="session")
def head() -> dict[str, Any]:
    """The head of a results file of this machine."""
    run = new_run("models", "oxytorch bench models", {})
    return {**run, "failures": []}


@pytest.fixture
def models_run(head: dict[str, Any]) -> dict[str, Any]:
    """Two models in fp32: OpenVINO fails on one, oxytorch is 2 and 4 times as fast as eager."""
    run = {**copy.deepcopy(head), "date": "2026-01-02T00:00:00+00:00"}
    for model, ours in (("bert", 0.05), ("resnet50", 0.025)):
        openvino = _peer("openvino", 0.04, 0.1)
        if model == "bert":
            openvino = new_record("openvino", "openvino")
            refuse(openvino, "failed", "RuntimeError: no such operation")
        run["results"].append(
            {
                "model": model,
                "title": model.upper(),
                "dtype": "float32",
                "batch": 1,
                "threads": 2,
                "eager_interleaved_over_alone": 1.0,
                "peers": [_peer("eager", 0.1, 0.1), openvino, _peer("oxytorch", ours, 0.1)],
            }
        )
    return run


@pytest.fixture
def ops_run(head: dict[str, Any]) -> dict[str, Any]:
    """One op at both sizes."""
    run = {**copy.deepcopy(head), "kind": "ops"}
    for size in ("memory", "cache"):
        run["results"].append(
            {
                "op": "rms_norm",
                "dtype": "bfloat16",
                "size": size,
                "sample": "7x64",
                "bytes": 1 << 20,
                "operations": 1,
                "threads": 2,
                "read_write_bandwidth": spread([30e9]),
                "peers": [_peer("eager", 2e-5, 2e-5), _peer("oxytorch", 1e-5, 2e-5)],
            }
        )
    return run


@pytest.fixture
def optim_run(head: dict[str, Any]) -> dict[str, Any]:
    """AdamW in two formats beside torch's fused step, and Lamb, which torch does not have."""
    run = {**copy.deepcopy(head), "kind": "optim"}
    fused = {**_step("fused", 0.05, 0.05), "label": "torch fused"}
    absent = new_record("fused", "torch fused")
    refuse(absent, "absent", "torch has no Lamb")
    contests = {
        "AdamW": [fused, _step("oxytorch", 0.04, 0.05), _step("oxytorch split+int8", 0.03, 0.05)],
        "Lamb": [{**absent, "format": "float32"}, _step("oxytorch", 0.06, None)],
    }
    for optimizer, peers in contests.items():
        run["results"].append(
            {
                "optimizer": optimizer,
                "case": "bert",
                "title": "BERT-base",
                "tensors": 199,
                "parameters": 109_482_240,
                "threads": 2,
                "base": "fused" if optimizer == "AdamW" else "oxytorch",
                "read_write_bandwidth": spread([50e9]),
                "peers": peers,
            }
        )
    return run


def _step(name: str, seconds: float, base: float | None) -> Any:
    record = _peer(name, seconds, base or seconds)
    record["format"] = name.partition(" ")[2] or "float32"
    record["bytes"] = 1_000_000_000
    record["bytes_per_parameter"] = 12.0
    record["bandwidth"] = spread([1e9 / seconds])
    record["time_over_base"] = spread([seconds / (base or seconds)])
    return record


@pytest.fixture
def training_run(head: dict[str, Any]) -> dict[str, Any]:
    """Two ways of training from two seeds: the other is twice as fast and ends a little worse."""
    run = {**copy.deepcopy(head), "kind": "training"}
    for way, seconds, worse in (("float32", 0.1, 0.0), ("bfloat16", 0.05, 0.3)):
        run["results"] += [
            {
                "measure": "step",
                "way": way,
                "threads": 2,
                "step_seconds": spread([seconds]),
                "optimizer_seconds": spread([seconds / 10]),
                "speedup": spread([0.1 / seconds]),
                "bytes_per_parameter": {"weights": 2.0, "gradients": 2.0, "low_half": 2.0},
            },
            {
                "measure": "loss",
                "way": way,
                "threads": 2,
                "seeds": [0, 1],
                "curves": [[(0, 4.6), (5, 2.0 + worse)], [(0, 4.6), (5, 2.5 + worse)]],
                "losses": [2.0 + worse, 2.5 + worse],
                "plain_losses": [2.0 + worse, 2.5 + worse],
            },
        ]
    return run


@pytest.fixture
def llm_run(head: dict[str, Any]) -> dict[str, Any]:
    """oxytorch's int4 twice as fast as a peer's, at 80 % of the limit; another peer is absent."""
    run = {**copy.deepcopy(head), "kind": "llm"}

    def times(prompt: float, token: float) -> dict[str, Any]:
        return {
            "status": "measured",
            "first": spread([prompt]),
            "token": spread([token]),
            "memory_bytes": 2_000_000_000,
        }

    run["results"] = [
        {
            "model": "tinyllama-1.1b",
            "weights": "int4",
            "prompt": 256,
            "tokens": 32,
            "kv_cache": "bf16",
            "group_size": 128,
            "threads": 2,
            "peers": [
                {
                    "peer": "oxytorch",
                    "label": "oxytorch int4",
                    **times(0.8, 0.02),
                    "token_bytes": 600_000_000,
                    "bandwidth": spread([30e9]),
                    "limit": spread([37.5e9]),
                    "fraction_of_limit": spread([0.8]),
                    "fraction_of_matrix_rate": spread([0.65]),
                },
                {
                    "peer": "llama.cpp",
                    "label": "llama.cpp int4",
                    **times(1.6, 0.04),
                    "token_bytes": 0,
                    "oxytorch_first_ratio": spread([2.0]),
                    "oxytorch_token_ratio": spread([2.0]),
                },
                {
                    "peer": "torchao",
                    "label": "torchao int4",
                    "status": "absent",
                    "reason": "torchao is not installed (pip install torchao)",
                },
            ],
        }
    ]
    return run
