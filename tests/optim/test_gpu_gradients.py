"""Gradients on a GPU: clipping, scaling, release, a rate that lies beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_device import (
    DEVICE,
    NEEDS_DEVICE,
    give_gradients,
    on_device,
    on_processor,
    same_optimizers,
    train,
)
from optimizers import make, weights
from torch import Tensor, nn

from oxytorch import optim

pytestmark = [NEEDS_DEVICE, pytest.mark.usefixtures("device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_clipping_in_the_step_is_that_of_torch(dtype: torch.dtype) -> None:
    ours = optim.SGD(on_device(weights(), dtype), lr=0.1)
    theirs = torch.optim.SGD(on_device(weights(), dtype), lr=0.1)
    for step in range(3):
        for optimizer in (ours, theirs):
            give_gradients(optimizer.param_groups[0]["params"], step)
        norm = ours.clip_grad_norm_(1.0)
        parameters = theirs.param_groups[0]["params"]
        wanted = nn.utils.clip_grad_norm_(parameters, 1.0)
        assert norm.dtype == wanted.dtype and norm.device == wanted.device
        torch.testing.assert_close(norm, wanted)
        ours.step()
        theirs.step()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    for own, other in zip(
        ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True
    ):
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)


def test_clipping_at_once_is_that_of_torch() -> None:
    ours, theirs = on_device(weights()), on_device(weights())
    for parameters in (ours, theirs):
        give_gradients(parameters, 0)
    norm = optim.clip_grad_norm_(ours, 1.0)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, 1.0))
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_a_norm_that_is_not_finite_is_an_error_if_wanted() -> None:
    parameters = on_device(weights())
    give_gradients(parameters, 0)
    parameters[0].grad[3, 3] = torch.nan
    optimizer = optim.SGD(parameters, lr=0.1)
    assert optimizer.clip_grad_norm_(1.0).isnan()
    with pytest.raises(RuntimeError, match="non-finite"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Lamb", "Adafactor"])
@pytest.mark.parametrize("clips", [False, True], ids=["plain", "clipped"])
def test_a_grad_scaler_divides_and_leaves_steps_out(name: str, clips: bool) -> None:
    ours, theirs = (make(name, on_device(weights())) for _ in range(2))
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
    for step in range(4):
        for optimizer, scale in ((ours, 1024.0), (theirs, 1.0)):
            give_gradients(optimizer.param_groups[0]["params"], step, scale)
        scaler.scale(torch.ones((), device=DEVICE))
        is_bad = step == 2
        if is_bad:
            ours.param_groups[0]["params"][0].grad[1, 2] = torch.inf
        if clips:
            norm = ours.clip_grad_norm_(1.0, scaler=scaler)
            wanted = theirs.clip_grad_norm_(1.0)
            if not is_bad:
                torch.testing.assert_close(norm, wanted)
        scaler.step(ours)
        if not is_bad:
            theirs.step()
        else:
            theirs.zero_grad()
        scaler._per_optimizer_states.clear()
    for own, other in zip(
        ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
        assert ours.state[own].get("step") == theirs.state[other].get("step")


def test_gradients_are_released_inside_backward() -> None:
    def run(device: torch.device, **options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
        optimizer = optim.AdamW(model.parameters(), lr=0.01, **options)
        for step in range(3):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step)).to(device)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    plain, released = run(DEVICE), run(DEVICE, release_gradients=True)
    for own, other in zip(released, plain, strict=True):
        assert torch.equal(own, other)


def test_a_rate_on_the_device_is_followed() -> None:
    rate = torch.tensor(0.01, device=DEVICE)
    ours = optim.AdamW(on_device(weights()), lr=rate)
    theirs = make("AdamW", weights())
    train(ours, 1)
    record = ours._step_caches[0, None]
    rate.fill_(0.25)
    train(ours, 2, first=1)
    assert ours._step_caches[0, None] is record
    with on_processor():
        train(theirs, 1)
        theirs.param_groups[0]["lr"] = 0.25
        train(theirs, 2, first=1)
    same_optimizers(ours, theirs, exactly=False)


def test_memory_report_counts_what_lies_on_the_device() -> None:
    parameter = torch.zeros(256, 256, device=DEVICE, dtype=torch.bfloat16)
    optimizer = optim.AdamW([parameter], master_weights="split", state_dtype=torch.int8)
    train(optimizer, 1)
    report = optimizer.memory_report()
    assert report["low_half"] == 2.0 and report["total"] < 6.1
