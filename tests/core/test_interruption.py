"""Exceptions that handlers of signals raise reach whoever called, wherever they come up."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import oxytorch
from oxytorch.core.interruption import pass_on_interruption


class TimeLimit(Exception):
    """What a program's own time limit raises."""


class Handler:
    """A handler in each of the forms that `signal.signal` takes."""

    def __call__(self, number: int, frame: Any) -> None:
        raise TimeLimit

    def method(self, number: int, frame: Any) -> None:
        raise TimeLimit

    def partial(self, kind: type[Exception], number: int, frame: Any) -> None:
        raise kind


def _function(number: int, frame: Any) -> None:
    raise RuntimeError("time limit")


HANDLERS: dict[str, tuple[Any, type[Exception]]] = {
    "object": (Handler(), TimeLimit),
    "method": (Handler().method, TimeLimit),
    "partial": (functools.partial(Handler().partial, TimeoutError), TimeoutError),
    "RuntimeError": (_function, RuntimeError),
}


@pytest.fixture(params=HANDLERS)
def limit(request: pytest.FixtureRequest) -> Iterator[type[Exception]]:
    """The exception that a handler raises as soon as SIGUSR1 comes."""
    handler, kind = HANDLERS[request.param]
    before = signal.signal(signal.SIGUSR1, handler)
    yield kind
    signal.signal(signal.SIGUSR1, before)


class Interrupted(nn.Module):
    """A signal comes in its run number `at`, counted from the next one on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sends the signal where it is due."""
        _due()
        return self.norm(self.linear(x)).relu() + x


RUNS = {"left": -1}


def _due() -> None:
    RUNS["left"] -= 1
    if RUNS["left"] == 0:
        signal.raise_signal(signal.SIGUSR1)


def _optimized(**options: Any) -> Callable[[torch.Tensor], Any]:
    RUNS["left"] = -1
    return oxytorch.optimize(Interrupted().eval(), **options)


@pytest.mark.parametrize(("at", "graph"), [(1, False), (2, True), (3, True)])
def test_optimize_passes_it_on(limit: type[Exception], at: int, graph: bool) -> None:
    model = Interrupted().eval()
    RUNS["left"] = at
    with pytest.raises(limit):
        oxytorch.optimize(model, sample_input=torch.randn(4, 64), graph=graph)
    RUNS["left"] = -1
    made = oxytorch.optimize(model, sample_input=torch.randn(4, 64), graph=graph)
    x = torch.randn(4, 64)
    with torch.no_grad():
        torch.testing.assert_close(made(x), model(x))


class Failing:
    """A program that is interrupted, or fails by itself."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def __call__(self, tensors: list[torch.Tensor]) -> None:
        if self.error is not None:
            raise self.error
        signal.raise_signal(signal.SIGUSR1)


class Plain(nn.Module):
    """A model that a program can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A sum."""
        return self.linear(x) + x


def test_programs_pass_it_on(limit: type[Exception]) -> None:
    x = torch.randn(4, 64)
    model = oxytorch.optimize(Plain().eval(), sample_input=x, graph=True, passes=["program"])
    replay = model.forward
    ((form, ((_, output),)),) = replay._programs.items()
    with torch.no_grad():
        replay._programs[form] = [(Failing(None), output)]
        with pytest.raises(limit):
            model(x)
        replay._programs[form] = [(Failing(RuntimeError("of its own")), output)]
        torch.testing.assert_close(model(x), model.linear(x) + x)


def test_errors_of_code_are_its_own(limit: type[Exception]) -> None:
    try:
        raise limit
    except limit as error:
        pass_on_interruption(error)
