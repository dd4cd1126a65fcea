"""Models in several processes: shared memory, queues, forked and spawned workers."""

from __future__ import annotations

import multiprocessing as standard
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import multiprocessing as mp
from torch import nn

from .compare import Log
from .layers import KINDS

pytestmark = pytest.mark.slow
NAMES = ("linear", "conv2d_norm", "lstm", "tied")
LONGEST = 60


def _first(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


def answer(model: nn.Module, x: torch.Tensor, queue: Any) -> None:
    """Work of a child: send an answer."""
    torch.set_num_threads(1)
    with torch.no_grad():
        queue.put(_first(model(x)).numpy().copy())


def halve(model: nn.Module, x: torch.Tensor, queue: Any) -> None:
    """Work of a child: write to all weights and send the answer after it."""
    torch.set_num_threads(1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    answer(model, x, queue)


def train(model: nn.Module, x: torch.Tensor, queue: Any) -> None:
    """Work of a child: two steps of Hogwild training."""
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        _first(model(x)).pow(2).mean().backward()
        optimizer.step()
    answer(model, x, queue)


def state_of(model: nn.Module, x: torch.Tensor, queue: Any) -> None:
    """Work of a child: send the state back."""
    queue.put({key: value.numpy().copy() for key, value in model.state_dict().items()})


def echo(model: nn.Module, x: torch.Tensor, queue: Any) -> None:
    """Work of a child: use a model that came through a queue."""
    received = queue.get(timeout=LONGEST)
    answer(received, x, queue)


def _child(
    method: str, work: Callable[..., None], model: Any, x: torch.Tensor, sent: Any = None
) -> Any:
    """Run one child to its end and return what it sent."""
    context = mp.get_context(method)
    queue = context.Queue()
    process = context.Process(target=work, args=(model, x, queue))
    process.start()
    if sent is not None:
        queue.put(sent)
    try:
        received = queue.get(timeout=LONGEST)
        process.join(LONGEST)
    finally:
        if process.is_alive():
            process.terminate()
    if isinstance(received, dict):
        return {key: torch.tensor(value) for key, value in received.items()}
    return torch.tensor(received)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shared", [False, True], ids=["copied", "shared"])
@pytest.mark.parametrize("work", [answer, halve, train, state_of], ids=lambda w: w.__name__)
@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("name", NAMES)
def test_child(check: Callable[..., None], name: str, method: str, work: Any, shared: bool) -> None:
    """Where the memory is shared, the parent sees what the child has written."""
    kind = KINDS[name]

    def use(model: Any, log: Log) -> None:
        x = kind.sample()
        with torch.no_grad():
            log(model(x), model(x))
        if shared:
            model.share_memory()
        log(_child(method, work, model, x))
        with torch.no_grad():
            log(model(x), model.state_dict())

    check(kind.build, use, "default", kind.sample, tolerance=1e-4 if work is train else None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_parent_writes_while_a_child_serves(check: Callable[..., None], name: str) -> None:
    """Actor and learner: the learner writes to shared weights, the actor reads them."""
    kind = KINDS[name]

    def use(model: Any, log: Log) -> None:
        x = kind.sample()
        model.share_memory()
        context = mp.get_context("spawn")
        requests, answers = context.Queue(), context.Queue()
        process = context.Process(target=serve, args=(model, requests, answers))
        process.start()
        try:
            for factor in (1.0, 0.5, 0.8):
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(factor)
                requests.put(x.numpy())
                log(torch.tensor(answers.get(timeout=LONGEST)))
                with torch.no_grad():
                    log(model(x))
            requests.put(None)
            process.join(LONGEST)
        finally:
            if process.is_alive():
                process.terminate()

    check(kind.build, use, "default", kind.sample)


def serve(model: nn.Module, requests: Any, answers: Any) -> None:
    """Answer requests until None comes."""
    torch.set_num_threads(1)
    while (request := requests.get(timeout=LONGEST)) is not None:
        with torch.no_grad():
            answers.put(_first(model(torch.tensor(request))).numpy().copy())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_model_through_a_queue(check: Callable[..., None], name: str) -> None:
    kind = KINDS[name]

    def use(model: Any, log: Log) -> None:
        context = mp.get_context("fork")
        queue = context.Queue()
        queue.put(model)
        received = queue.get(timeout=LONGEST)
        with torch.no_grad():
            log(received(kind.sample()), model(kind.sample()))
            for p in model.parameters():
                p.mul_(0.5)
            log(model(kind.sample()), received(kind.sample()))

    check(kind.build, use, "default", kind.sample)


@pytest.mark.parametrize("name", NAMES)
def test_pool_of_the_standard_library(check: Callable[..., None], name: str) -> None:
    kind = KINDS[name]

    def use(model: Any, log: Log) -> None:
        with standard.get_context("spawn").Pool(1) as pool:
            log(torch.tensor(pool.apply_async(called, (model, kind.sample())).get(LONGEST)))

    check(kind.build, use, "default", kind.sample)


def called(model: nn.Module, x: torch.Tensor) -> Any:
    """Return an answer as a list, in a worker of a pool."""
    torch.set_num_threads(1)
    with torch.no_grad():
        return _first(model(x)).tolist()
