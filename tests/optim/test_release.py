"""Gradient release: steps inside backward."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oxytorch import optim

NAMES = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Lion", "Lamb", "Lars", "Adafactor"]
SPLIT = {"master_weights": "split", "state_dtype": torch.int8}


class Network(nn.Module):
    """Two layers that share a weight, and one that is used twice."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(70, 70)
        self.second = nn.Linear(70, 70)
        self.last = nn.Linear(70, 3)
        self.second.weight = self.first.weight
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(torch.relu(self.second(torch.relu(self.first(x))))))


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    dtype = next(model.parameters()).dtype
    return model(torch.randn(4, 70, generator=generator).to(dtype)).float().square().mean()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    biases = [parameter for name, parameter in named.items() if "bias" in name]
    others = [parameter for name, parameter in named.items() if "bias" not in name]
    return [{"params": others}, {"params": biases, "lr": 0.003}]


def train(model: nn.Module, optimizer: Any, steps: int = 4, first: int = 0) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(first, first + steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, ours), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("options", [{}, SPLIT], ids=["float32", "split+int8"])
@pytest.mark.parametrize("name", NAMES)
def test_released_steps_have_the_same_bits(name: str, options: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if options else torch.float32
    models = Network(dtype), Network(dtype)
    made = [
        getattr(optim, name)(groups_of(model), lr=0.01, release_gradients=releases, **options)
        for model, releases in zip(models, (True, False), strict=True)
    ]
    for model, optimizer in zip(models, made, strict=True):
        train(model, optimizer)
    assert_same(*models)
    ours, theirs = (optimizer.state_dict()["state"] for optimizer in made)
    assert ours.keys() == theirs.keys()
    for key in ours:
        for part, value in ours[key].items():
            assert not isinstance(value, Tensor) or torch.equal(value, theirs[key][part]), part


def test_gradients_are_gone_after_backward_and_the_step_is_done() -> None:
    model = Network()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = optim.AdamW(model.parameters(), release_gradients=True)
    loss_of(model, 0).backward()
    after = [parameter.detach().clone() for parameter in model.parameters()]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    optimizer.step()
    for parameter, value in zip(model.parameters(), after, strict=True):
        assert torch.equal(parameter, value)


def test_step_hooks_are_called() -> None:
    model, called = Network(), []
    optimizer = optim.SGD(model.parameters(), lr=0.1, release_gradients=True)
    optimizer.register_step_pre_hook(lambda *arguments: called.append("before"))
    optimizer.register_step_post_hook(lambda *arguments: called.append("after"))
    train(model, optimizer, 2)
    assert called == ["before", "after"] * 2


def test_a_closure_is_called_once() -> None:
    models = Network(), Network()
    losses = []
    for model, releases in zip(models, (True, False), strict=True):
        optimizer = optim.AdamW(model.parameters(), release_gradients=releases)

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        losses.append([optimizer.step(closure).item() for _ in range(2)])
    assert losses[0] == losses[1]
    assert_same(*models)


def test_gradients_set_by_hand_are_applied_by_step() -> None:
    weight = torch.zeros(3, requires_grad=True)
    optimizer = optim.SGD([weight], lr=1.0, release_gradients=True)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert weight.tolist() == [-1.0, -1.0, -1.0] and weight.grad is None


def test_parameters_and_groups_that_come_later_are_released() -> None:
    models = Network(), Network()
    for model, releases in zip(models, (True, False), strict=True):
        model.last.requires_grad_(False)
        optimizer = optim.AdamW(model.first.parameters(), release_gradients=releases)
        optimizer.add_param_group({"params": [model.second.bias], "lr": 0.1})
        optimizer.add_param_group({"params": list(model.last.parameters())})
        train(model, optimizer, 1)
        model.last.requires_grad_(True)
        train(model, optimizer, 2, first=1)
        loss_of(model, 9).backward()
        assert releases == all(parameter.grad is None for parameter in model.parameters())
        optimizer.step()
    assert_same(*models)


def test_checkpoints_continue() -> None:
    models = Network(), Network()
    whole = optim.AdamW(models[0].parameters(), release_gradients=True)
    train(models[0], whole, 4)
    part = optim.AdamW(models[1].parameters(), release_gradients=True)
    train(models[1], part, 2)
    again = Network()
    again.load_state_dict(models[1].state_dict())
    optimizer = torch.optim.AdamW(again.parameters())
    optimizer.load_state_dict(part.state_dict())
    resumed = optim.AdamW(again.parameters(), release_gradients=True)
    resumed.load_state_dict(optimizer.state_dict())
    for group in resumed.param_groups:
        group["lr"] = whole.defaults["lr"] * 0.5
        group.pop("initial_lr", None)
    train(again, resumed, 2, first=2)
    assert_same(models[0], again)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_release_their_own_gradients(way: str) -> None:
    model = Network()
    optimizer = optim.AdamW(model.parameters(), release_gradients=True)
    train(model, optimizer, 2)
    pair = (model, optimizer)
    copied = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    for each, own in (pair, copied):
        loss_of(each, 7).backward()
        own.step()
        assert all(parameter.grad is None for parameter in each.parameters())
    assert_same(model, copied[0])


def test_parameters_do_not_keep_the_optimizer_alive() -> None:
    model = Network()
    reference = weakref.ref(optim.SGD(model.parameters(), release_gradients=True))
    gc.collect()
    assert reference() is None
    before = model.first.weight.detach().clone()
    loss_of(model, 0).backward()
    assert torch.equal(model.first.weight, before) and model.first.weight.grad is not None


# What cannot work with it


def test_accumulation_is_an_error() -> None:
    model = Network()
    optimizer = optim.AdamW(model.parameters(), release_gradients=True)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"AdamW: a second backward pass before step\(\)"):
        loss_of(model, 1).backward()
    optimizer.step()
    loss_of(model, 2).backward()


@pytest.mark.parametrize("way", ["method", "function"])
def test_clipping_is_an_error(way: str) -> None:
    model = Network()
    optimizer = optim.AdamW(model.parameters(), release_gradients=True)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="AdamW: clip_grad_norm_ needs the gradients of all"):
        if way == "method":
            optimizer.clip_grad_norm_(1.0)
        else:
            optim.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("unscales", [True, False])
def test_grad_scaler_is_an_error(unscales: bool) -> None:
    model = Network()
    optimizer = optim.AdamW(model.parameters(), release_gradients=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="AdamW: GradScaler needs the gradients of all"):
        scaler.step(optimizer)


def test_replicas_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = Network()
    optimizer = optim.AdamW(model.parameters(), release_gradients=True)
    with pytest.raises(RuntimeError, match="DistributedDataParallel sums gradients only after"):
        loss_of(model, 0).backward()
    optimizer.step()


MEMORY_SCRIPT = """
from pathlib import Path
import torch
from torch import nn
from oxytorch import optim

torch.set_num_threads(1)
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(24)])
x = torch.ones(8, 1024)

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024

# Code and buffers of the libraries.
first = nn.Sequential(model[0], nn.Linear(1024, 1024, bias=False))
first(x).sum().backward()
optim.SGD(first.parameters()).step()
model[0].weight.grad = None
del first
before = peak()
for releases in (True, False):
    optimizer = optim.SGD(model.parameters(), lr=1e-6, release_gradients=releases)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(peak() - before)
    del optimizer
"""


@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="it keeps freed memory")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_gradients_of_the_whole_model_never_exist_together() -> None:
    # Else glibc may keep what is freed, by chance.
    given = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT], capture_output=True, text=True, check=True, env=given
    )
    released, kept = (int(line) for line in done.stdout.split())
    # All gradients together take 96 MiB, each 4; two of them were there before.
    assert released < 40, (released, kept)
    assert kept > 80, (released, kept)
