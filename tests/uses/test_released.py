"""A packed weight is packed again once nobody holds its plain values any more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import oxytorch
from oxytorch.core.packed import PackedTensor
from oxytorch.quantization import (
    Int8Weight,
    WeightConfig,
)
from weight_configs import ONE_OF_EACH

from .compare import optimized
from .layers import KINDS, Conv1D
from .registers import into

READS: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {}
read = into(READS)
"""Registers something that shows the plain values of a model's weights to somebody."""


@read
def call_with_gradients(model: nn.Module, x: torch.Tensor) -> None:
    model(x)


@read
def backward(model: nn.Module, x: torch.Tensor) -> None:
    found = model(x)
    (found[0] if isinstance(found, tuple) else found).sum().backward()


@read
def autocast(model: nn.Module, x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model(x)


@read
def state_dict(model: nn.Module, x: torch.Tensor) -> None:
    model.state_dict()


@read
def state_dict_loaded(model: nn.Module, x: torch.Tensor) -> None:
    model.load_state_dict(model.state_dict())


@read
def copied(model: nn.Module, x: torch.Tensor) -> None:
    copy.deepcopy(model).state_dict()


@read
def written_in_place(model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0)


@read
def views(model: nn.Module, x: torch.Tensor) -> None:
    for parameter in model.parameters():
        parameter.detach().flatten().view(-1)[:2].sum()


@read
def arrays(model: nn.Module, x: torch.Tensor) -> None:
    for parameter in model.parameters():
        if parameter.dtype != torch.bfloat16:
            parameter.detach().numpy().sum()


def _check(model: Any, x: torch.Tensor, way: str) -> None:
    def weights() -> list[Any]:
        return [p for p in model.parameters() if isinstance(p, PackedTensor)]

    with torch.no_grad():
        before = model(x)
    assert weights()
    READS[way](model, x)
    with torch.no_grad():
        after = model(x)
    torch.testing.assert_close(after, before)
    assert not [weight.shape for weight in weights() if not weight.is_packed()]
    assert not any(w.cell.is_out for w in weights())


@pytest.mark.parametrize("way", [*READS])
@pytest.mark.parametrize("form", ["sample", "bfloat16"])
@pytest.mark.parametrize("name", ["linear", "conv1d_norm", "conv2d", "conv2d_norm", "lstm", "tied"])
def test_weights_of_optimize(name: str, form: str, way: str) -> None:
    kind = KINDS[name]
    _check(optimized(kind.build(), form, kind.sample()), kind.sample(), way)


@pytest.mark.parametrize("way", [*READS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", ONE_OF_EACH, ids=repr)
def test_quantized_weights(config: WeightConfig, dtype: torch.dtype, way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval().to(dtype)
    oxytorch.quantize_(model, config)
    _check(model, torch.randn(3, 64).to(dtype), way)


@pytest.mark.parametrize("way", [*READS])
def test_quantized_weights_that_stand_the_other_way_round(way: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = Conv1D().eval()
    oxytorch.quantize_(model, Int8Weight())
    _check(model, torch.randn(3, 12), way)


@pytest.mark.parametrize("way", ["call_with_gradients", "state_dict", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", ["int8", "int4", "nf4", "fp8"])
def test_language_models(weights: str, dtype: torch.dtype, way: str) -> None:
    from tiny import tiny_llama

    model = tiny_llama(seed=0, hidden_size=128, intermediate_size=256)
    model = oxytorch.llm.optimize(model, dtype=dtype, weights=weights)
    x = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        before = model(x).logits
    READS[way](model, x)
    with torch.no_grad():
        torch.testing.assert_close(model(x).logits, before)
    found = [p for p in model.parameters() if isinstance(p, PackedTensor)]
    assert found
    assert not any(p.cell.is_out for p in found)
