"""DDP and FSDP2 with two processes, against stock PyTorch wrapped alike and one process alone.

All cases run in one pair of processes, in the order of this file; a failed case ends the pair.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oxytorch import optim

PROCESSES = 2
LIMIT = 90.0
"""Seconds for all cases together."""

Case = Callable[[int], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class Network(nn.Module):
    """Rows that divide evenly, unevenly, and fewer rows than processes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(70, 65)
        self.norm = nn.LayerNorm(65)
        self.second = nn.Linear(65, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.first.weight.dtype
        hidden = F.gelu(self.norm(self.first(x.to(dtype))))
        scores: Tensor = self.last(self.second(hidden)).float()
        return scores


def _network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network()


def _batch(step: int) -> Tensor:
    """The inputs of all processes together."""
    return torch.randn(8, 70, generator=torch.Generator().manual_seed(step))


def _sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (PROCESSES,)))
    return model


def _wrapped(kind: str, model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model) if kind == "ddp" else _sharded(model)


def _step(model: nn.Module, optimizer: Any, x: Tensor, scaler: Any = None) -> float:
    loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


def _train(
    model: nn.Module, optimizer: Any, rank: int | None, steps: int = 4, first: int = 0
) -> None:
    """Trains on the part of the process `rank`, or on everything."""
    for step in range(first, first + steps):
        x = _batch(step)
        _step(model, optimizer, x if rank is None else x.chunk(PROCESSES)[rank])


def _whole(tensor: Tensor) -> Tensor:
    """The tensor with all its shards."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def _weights(model: nn.Module) -> list[Tensor]:
    return [_whole(parameter) for parameter in model.parameters()]


def _assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-6)


def _assert_in_step(tensors: list[Tensor]) -> None:
    """Fails unless both processes have the same bits."""
    for tensor in tensors:
        bits = tensor.contiguous().flatten().view(torch.uint8)
        first = bits.clone()
        torch.distributed.broadcast(first, 0)
        assert torch.equal(bits, first)


def _check_against_stock(kind: str, rank: int, name: str, **options: Any) -> None:
    ours, stock = getattr(optim, name), getattr(torch.optim, name)
    models = [_wrapped(kind, _network()), _wrapped(kind, _network()), _network()]
    optimizers = [
        ours(models[0].parameters(), **options),
        stock(models[1].parameters(), **options),
        ours(models[2].parameters(), **options),
    ]
    for model, optimizer, own in zip(models, optimizers, (rank, rank, None), strict=True):
        _train(model, optimizer, own)
    weights = _weights(models[0])
    _assert_close(weights, _weights(models[1]))
    _assert_close(weights, _weights(models[2]))
    _assert_in_step(weights)
    assert not torch.equal(weights[0], _network().first.weight)
    for parameter, other in zip(*(m.parameters() for m in models[:2]), strict=True):
        state, wanted = optimizers[0].state[parameter], optimizers[1].state[other]
        assert state.keys() == wanted.keys()
        for key, value in wanted.items():
            assert type(state[key]) is type(value), key
            _assert_close([_whole(state[key])], [_whole(value)])


@case
def ddp_is_that_of_stock(rank: int) -> None:
    _check_against_stock("ddp", rank, "AdamW", lr=1e-2, weight_decay=0.1)
    _check_against_stock("ddp", rank, "Adam", lr=torch.tensor(1e-2), amsgrad=True)


@case
def fsdp_is_that_of_stock(rank: int) -> None:
    _check_against_stock("fsdp", rank, "AdamW", lr=1e-2, weight_decay=0.1)
    _check_against_stock("fsdp", rank, "Adam", lr=torch.tensor(1e-2), amsgrad=True)


# The processes


def _work(rank: int, folder: str) -> None:
    """Runs the cases in one process; writes for each an empty file, or the error."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=PROCESSES,
        timeout=timedelta(seconds=30),
    )
    for name, function in CASES.items():
        began = time.perf_counter()
        try:
            function(rank)
        except BaseException:
            Path(folder, f"{name}.{rank}").write_text(traceback.format_exc())
            sys.exit(1)
        Path(folder, f"{name}.{rank}").touch()
        if rank == 0:
            print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that the processes have written to; they have ended."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch was built without gloo")
    folder = tmp_path_factory.mktemp("distributed")
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=_work, args=(i, str(folder))) for i in range(PROCESSES)]
    end = time.monotonic() + LIMIT
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    yield folder


@pytest.mark.parametrize("name", CASES)
def test_distributed(name: str, outcomes: Path) -> None:
    found = [outcomes / f"{name}.{rank}" for rank in range(PROCESSES)]
    errors = [path.read_text() for path in found if path.exists()]
    assert not any(errors), "\n".join(errors)
    assert len(errors) == PROCESSES, f"did not end within {LIMIT} s, or a case before it failed"
