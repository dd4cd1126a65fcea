"""A step of torch's fused optimizers, whose operators raise no version, is seen by what it made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from oxytorch import llm
from oxytorch.core.fused_steps import count_fused_steps
from oxytorch.core.tensor_forms import SMALL
from tiny import tiny_llama

WIDTH = 256
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda given: torch.optim.SGD(given, lr=0.1, fused=True),
    "momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda given: torch.optim.Adam(given, lr=0.01, fused=True),
    "adamw": lambda given: torch.optim.AdamW(given, lr=0.01, fused=True),
    "adagrad": lambda given: torch.optim.Adagrad(given, lr=0.01, fused=True),
}
OURS = {"sgd": oxytorch.optim.SGD, "adamw": oxytorch.optim.AdamW}


def _linear() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def _normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.lstm(x)[0]


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (_linear, torch.randn(64, WIDTH)),
    "normed": (_normed, torch.randn(2, 64, 12, 12)),
    "recurrent": (_Recurrent, torch.randn(2, 6, WIDTH)),
}
WAYS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "passes": lambda model, x: oxytorch.optimize(model, sample_input=x),
    "bfloat16": lambda model, x: oxytorch.optimize(model, sample_input=x, dtype=torch.bfloat16),
    "program": lambda model, x: oxytorch.optimize(model, sample_input=x, graph=True, inplace=True),
    "compiled": lambda model, x: torch.compile(model, backend="oxytorch"),
}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step along the same gradients whatever the model computes."""
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(number)
        values = torch.randn(parameter.shape, generator=generator)
        parameter.grad = values.to(parameter.dtype)
    optimizer.step()


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_a_fused_step_is_seen(kind: str, way: str) -> None:
    torch._dynamo.reset()
    make, x = MODELS[kind]
    model = make().eval()
    assert any(parameter.nbytes > SMALL for parameter in model.parameters())
    fast = WAYS[way](copy.deepcopy(model), x)
    optimizers = [OPTIMIZERS["adamw"](one.parameters()) for one in (model, fast)]
    allowed = 0.05 if way == "bfloat16" else 1e-4
    for _ in range(3):
        before = model(x)
        fast(x), fast(x)  # packs the weights, or makes a program
        for one, optimizer in zip((model, fast), optimizers, strict=True):
            _step(one, optimizer)
        assert _distance(before, model(x)) > 2 * allowed
        assert _distance(fast(x), model(x)) < allowed


@pytest.mark.parametrize("name", OPTIMIZERS)
@torch.no_grad()
def test_steps_of_all_fused_optimizers_are_seen(name: str) -> None:
    make, x = MODELS["linear"]
    model = make().eval()
    fast = WAYS["program"](copy.deepcopy(model), x)
    before = model(x)
    fast(x), fast(x)
    for one in (model, fast):
        _step(one, OPTIMIZERS[name](one.parameters()))
    assert _distance(before, model(x)) > 1e-2
    assert _distance(fast(x), model(x)) < 1e-4


@torch.no_grad()
def test_a_language_model_sees_a_fused_step() -> None:
    model = tiny_llama(0, hidden_size=160, intermediate_size=320)
    fast: Any = llm.optimize(copy.deepcopy(model), dtype=torch.float32)
    ids = torch.arange(24).reshape(1, -1)
    for _ in range(2):
        before = model(ids).logits
        fast(ids), fast(ids)
        llm.generate(fast, ids, max_new_tokens=4)
        for one in (model, fast):
            _step(one, OPTIMIZERS["adamw"](one.parameters()))
        wanted = model(ids).logits
        assert _distance(before, wanted) > 1e-2
        assert _distance(fast(ids).logits, wanted) < 1e-3
        found = llm.generate(fast, ids, max_new_tokens=4)
        assert torch.equal(found, model.generate(ids, max_new_tokens=4, do_sample=False))


def test_training_with_a_compiled_model_sees_fused_steps() -> None:
    torch._dynamo.reset()
    make, x = MODELS["linear"]
    model = make()
    fast = copy.deepcopy(model)
    compiled = torch.compile(fast, backend="oxytorch")
    calls: list[tuple[Any, Any]] = [(model, model), (fast, compiled)]
    optimizers = [OPTIMIZERS["adam"](one.parameters()) for one, _ in calls]
    for _ in range(3):
        losses = []
        for (_, call), optimizer in zip(calls, optimizers, strict=True):
            optimizer.zero_grad()
            loss = call(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("name", OURS)
def test_steps_of_our_own_are_counted_once(name: str) -> None:
    count_fused_steps()
    parameter = nn.Parameter(torch.randn(8))
    parameter.grad = torch.randn(8)
    versions = []
    for settings in ({}, {"fused": True}):
        before = parameter._version
        OURS[name]([parameter], lr=0.1, **settings).step()
        versions.append(parameter._version - before)
    assert versions == [1, 1]


def test_a_parameter_without_a_gradient_is_not_counted() -> None:
    count_fused_steps()
    moved, still = (nn.Parameter(torch.randn(8)) for _ in range(2))
    moved.grad = torch.randn(8)
    OPTIMIZERS["sgd"]([moved, still]).step()
    assert moved._version == 1
    assert still._version == 0
