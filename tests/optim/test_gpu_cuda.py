"""Steps on NVIDIA GPUs: graphs, streams, no waiting, several processes, models."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_device import FORMATS, give_gradients, on_device, same_optimizers, train
from optimizers import CASES, IDS, make, weights
from torch import Tensor, nn

import oxytorch
from oxytorch import optim

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICE = torch.device("cuda:0")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises an error where the host would wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 80), nn.GELU(), nn.Linear(80, 64)).to(DEVICE)


def inputs(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 64, generator=generator).to(DEVICE)


@pytest.mark.parametrize("kind", ["fp32", "fp16-int8", "split-int8"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_no_step_waits_for_the_gpu(name: str, options: dict[str, Any], kind: str) -> None:
    dtype, own = FORMATS[kind]
    optimizer = make(name, on_device(weights(), dtype), **options, **own)
    parameters = optimizer.param_groups[0]["params"]
    gradients = [[torch.ones_like(p) for p in parameters] for _ in range(4)]
    # torch's check for infinite gradients knows no bfloat16.
    scaler = torch.amp.GradScaler("cuda", enabled=dtype != torch.bfloat16)
    scaler.scale(torch.ones((), device=DEVICE))

    def run(steps: range) -> None:
        for step in steps:
            for parameter, gradient in zip(parameters, gradients[step], strict=True):
                parameter.grad = gradient
            optimizer.clip_grad_norm_(1.0, scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    # Dampened momentum begins otherwise in a first step that is left out, which has to be known.
    waits = scaler.is_enabled() and bool(options.get("dampening"))
    run(range(waits))
    with no_waiting():
        run(range(waits, 4))


@pytest.mark.parametrize(
    "name", ["SGD", "AdamW", "Adagrad", "RMSprop", "Lion", "Lamb", "Lars", "Adafactor"]
)
@pytest.mark.parametrize("kind", ["fp32", "split-bf16"])
def test_a_captured_step_is_a_step(name: str, kind: str) -> None:
    dtype, own = FORMATS[kind]
    options = {"momentum": 0.9} if name in ("SGD", "Lars") else {}
    ours, theirs = (make(name, on_device(weights(), dtype), **options, **own) for _ in range(2))
    rate = torch.tensor(0.01, device=DEVICE)
    for group in (ours.param_groups[0], theirs.param_groups[0]):
        group["lr"] = rate
    train(ours, 2)
    train(theirs, 2)
    parameters = ours.param_groups[0]["params"]
    static = [torch.zeros_like(p) for p in parameters]
    for parameter, gradient in zip(parameters, static, strict=True):
        parameter.grad = gradient
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for step in range(2, 6):
        rate.mul_(0.5)
        give_gradients(theirs.param_groups[0]["params"], step)
        for own_gradient, other in zip(static, theirs.param_groups[0]["params"], strict=True):
            own_gradient.copy_(other.grad)
        graph.replay()
        theirs.step()
        if step == 3:
            # A step outside of the graph, with other gradients, leaves the graph as it was.
            train(ours, 1, first=77)
            train(theirs, 1, first=77)
    same_optimizers(ours, _on_host(theirs))


def _on_host(optimizer: Any) -> Any:
    """What same_optimizers compares with."""
    parameters = optimizer.param_groups[0]["params"]
    copies = [parameter.detach().cpu() for parameter in parameters]
    states = [{k: v.cpu() for k, v in optimizer.state[own].items()} for own in parameters]
    return SimpleNamespace(
        param_groups=[{"params": copies}], state=dict(zip(copies, states, strict=True))
    )


def test_a_whole_training_step_can_be_captured() -> None:
    models = network(), network()
    optimizers = [optim.AdamW(model.parameters(), lr=0.01) for model in models]
    x = inputs(0)

    def train_once(place: int) -> None:
        optimizers[place].zero_grad(set_to_none=True)
        models[place](x).square().mean().backward()
        optimizers[place].clip_grad_norm_(0.5)
        optimizers[place].step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train_once(0)
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(3):
        train_once(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train_once(0)
    for step in range(1, 5):
        x.copy_(inputs(step))
        graph.replay()
        train_once(1)
    for own, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(own, other)


def test_a_capture_without_a_step_before_says_so() -> None:
    optimizer = make("AdamW", on_device(weights()))
    give_gradients(optimizer.param_groups[0]["params"], 0)
    with (
        pytest.raises(RuntimeError, match="make one more step, as warm-up"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


def test_steps_follow_the_current_stream() -> None:
    ours, theirs = (make("AdamW", on_device(weights())) for _ in range(2))
    stream = torch.cuda.Stream()
    for step in range(4):
        give_gradients(ours.param_groups[0]["params"], step)
        give_gradients(theirs.param_groups[0]["params"], step)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            # Gradients are not there until the stream has come so far.
            torch.cuda._sleep(20_000_000)
            for parameter in ours.param_groups[0]["params"]:
                parameter.grad.mul_(3)
            ours.step()
        for parameter in theirs.param_groups[0]["params"]:
            parameter.grad.mul_(3)
        theirs.step()
        torch.cuda.synchronize()
    same_optimizers(ours, _on_host(theirs))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_parameters_may_lie_on_several_gpus() -> None:
    spread = [w.to(f"cuda:{i % 2}") for i, w in enumerate(weights())]
    ours, theirs = make("Lamb", spread), make("Lamb", on_device(weights()))
    for own, other in zip(train(ours, 4), train(theirs, 4), strict=True):
        assert torch.equal(own.cpu(), other.cpu())
    with torch.cuda.device(1):
        train(ours, 1, first=4)
    train(theirs, 1, first=4)
    for own, other in zip(
        ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True
    ):
        assert torch.equal(own.cpu(), other.cpu())


def test_a_model_is_trained_in_split_weights() -> None:
    def run(dtype: torch.dtype | None) -> list[float]:
        model = network()
        model, optimizer = oxytorch.optimize(
            model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), dtype=dtype
        )
        assert isinstance(optimizer, optim.AdamW)
        losses = []
        for step in range(30):
            loss = (model(inputs(step % 3)).float() - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if dtype is not None:
            assert model[0].weight.dtype == dtype
        assert model.state_dict()["0.weight"].dtype == torch.float32
        return losses

    wide, split = run(None), run(torch.bfloat16)
    assert split[-1] < 0.5 * split[0]
    assert split[-1] == pytest.approx(wide[-1], rel=0.1)


PROGRAM = """
import logging, torch
from oxytorch import optim
logging.basicConfig()
ours, theirs = torch.ones(500, device="cuda"), torch.ones(500, device="cuda")
for parameter, kind in ((ours, optim.AdamW), (theirs, torch.optim.AdamW)):
    optimizer = kind([parameter], lr=0.1)
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
torch.testing.assert_close(ours, theirs)
split = torch.ones(500, device="cuda", dtype=torch.bfloat16)
optimizer = optim.AdamW([split], lr=0.1, master_weights="split")
split.grad = torch.ones_like(split)
optimizer.step()
print("done")
"""


@pytest.mark.parametrize("way", ["off", "aot", ""])
def test_plain_torch_takes_over_unless_a_way_was_forced(way: str, tmp_path: Any) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "OXYTORCH_GPU": way},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if way == "aot" and found.returncode:
        assert "NoKernelError" in found.stderr and "oxytorch aot build" in found.stderr
    else:
        assert found.returncode == 0, found.stderr
        assert found.stdout.strip() == "done"


@pytest.mark.parametrize("name", ["AdamW", "Lamb"])
def test_fully_sharded_parameters_make_the_steps_of_plain_ones(name: str) -> None:
    program = f"""
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from oxytorch import optim
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 80), nn.GELU(), nn.Linear(80, 64)).cuda()
plain, sharded = network(), network()
for layer in sharded:
    if isinstance(layer, nn.Linear): fully_shard(layer)
fully_shard(sharded)
copies = nn.parallel.DistributedDataParallel(network())
models = plain, sharded, copies
optimizers = [optim.{name}(model.parameters(), lr=0.01) for model in models]
for step in range(4):
    x = torch.randn(16, 64, device="cuda")
    for model, optimizer in zip(models, optimizers):
        model(x).square().mean().backward()
    if step: torch.cuda.set_sync_debug_mode("error")
    for optimizer in optimizers: optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    for optimizer in optimizers: optimizer.zero_grad()
for own, shard, copy in zip(plain.parameters(), sharded.parameters(), copies.parameters()):
    assert torch.equal(own, shard.full_tensor()), "sharded"
    assert torch.equal(own, copy), "copies"
assert len(optimizers[1]._step_caches) == 1
dist.destroy_process_group()
print("done")
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False
    )
    assert found.stdout.strip().endswith("done"), found.stdout + found.stderr
