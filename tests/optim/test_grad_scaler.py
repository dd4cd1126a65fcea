"""GradScaler: the scale and infinite gradients are the fused step's business."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from optimizers import Sweeps, make, weights
from torch import nn

from oxytorch import optim

NAMES = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Lion", "Lamb", "Lars", "Adafactor"]


def scaler_of(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, **options)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 5))


def train(optimizer: Any, model: nn.Module, clip: Any = None) -> tuple[list[float], list[float]]:
    """Eight steps under fp16 autocast, of which two meet infinite gradients: scales and losses."""
    scaler = scaler_of()
    generator = torch.Generator().manual_seed(1)
    scales, losses = [], []
    for step in range(8):
        x, y = torch.randn(8, 16, generator=generator), torch.randn(8, 5, generator=generator)
        with torch.autocast("cpu", torch.float16):
            loss = (model(x).float() - y).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step in (2, 3):
            next(model.parameters()).grad[1, 2] = math.inf if step == 2 else math.nan
        if clip is not None:
            clip(scaler)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        losses.append(loss.item())
    return scales, losses


def test_scale_grows_and_backs_off_as_with_the_fused_step_of_torch() -> None:
    ours, theirs = network(), network()
    found = train(optim.AdamW(ours.parameters(), lr=0.01), ours)
    expected = train(torch.optim.AdamW(theirs.parameters(), lr=0.01, fused=True), theirs)
    assert found[0] == expected[0] == [1024.0, 2048.0, 1024.0, 512.0, 512.0, 1024.0, 1024.0, 2048.0]
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_scaled_gradients_make_the_same_step(name: str) -> None:
    plain, scaled = make(name, weights()), make(name, weights())
    scaler = scaler_of()
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        for one, other in zip(*(o.param_groups[0]["params"] for o in (plain, scaled)), strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            # A power of two, so that nothing is rounded.
            other.grad = one.grad * 1024
        scaler.scale(torch.ones(()))
        plain.step()
        scaler.step(scaled)
        scaler._per_optimizer_states.clear()
    for one, other in zip(*(o.param_groups[0]["params"] for o in (plain, scaled)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", NAMES)
def test_an_infinite_gradient_leaves_everything_as_it_was(name: str, bad: float) -> None:
    optimizer = make(name, weights())
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    parameters = optimizer.param_groups[0]["params"]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = [parameter.clone() for parameter in parameters]
    states = optimizer.state_dict()["state"]
    steps = {k: float(state["step"]) for k, state in states.items() if "step" in state}
    parameters[-1].grad[-1] = bad
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
    states = optimizer.state_dict()["state"]
    assert steps == {k: float(state["step"]) for k, state in states.items() if "step" in state}
    assert scaler.get_scale() == 512.0


def test_no_sweep_is_added_to_those_of_torch() -> None:
    found = []
    for make_optimizer in (optim.AdamW, torch.optim.AdamW):
        how = {} if make_optimizer is optim.AdamW else {"fused": True}
        weight = torch.ones(64, 64)
        optimizer = make_optimizer([weight], **how)
        weight.grad = torch.ones(64, 64)
        optimizer.step()
        scaler = scaler_of()
        scaler.scale(torch.ones(()))
        with Sweeps() as mode:
            scaler.step(optimizer)
        found.append(mode.names)
    check = "_amp_foreach_non_finite_check_and_unscale_"
    assert found == [[check, "optimizer_step"], [check, "_fused_adamw_"]]


@pytest.mark.parametrize("unscales", [False, True])
def test_clipping_sees_gradients_without_the_scale(unscales: bool) -> None:
    ours, theirs = network(), network()
    optimizer = optim.AdamW(ours.parameters(), lr=0.01)
    stock = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    norms: tuple[list[float], list[float]] = ([], [])

    def clip(scaler: torch.amp.GradScaler) -> None:
        if unscales:
            scaler.unscale_(optimizer)
        norms[0].append(optimizer.clip_grad_norm_(0.1, scaler=scaler).item())

    def clip_stock(scaler: torch.amp.GradScaler) -> None:
        scaler.unscale_(stock)
        norms[1].append(nn.utils.clip_grad_norm_(theirs.parameters(), 0.1).item())

    found, expected = train(optimizer, ours, clip), train(stock, theirs, clip_stock)
    assert found[0] == expected[0]
    for one, other in zip(*norms, strict=True):
        assert one == pytest.approx(other, rel=1e-3, nan_ok=True)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_forgetting_the_scaler_while_clipping_is_an_error() -> None:
    weight = torch.zeros(3)
    optimizer = optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(3)
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    optimizer.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="with scaler= if there is a GradScaler"):
        scaler.step(optimizer)
    assert weight.tolist() == [0.0, 0.0, 0.0]


def test_a_disabled_scaler_changes_nothing() -> None:
    weight = torch.zeros(2)
    optimizer = optim.SGD([weight], lr=1.0)
    weight.grad = torch.tensor([3.0, 4.0])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert optimizer.clip_grad_norm_(1.0, scaler=scaler).item() == 5.0
    scaler.step(optimizer)
    torch.testing.assert_close(weight, torch.tensor([-0.6, -0.8]))
