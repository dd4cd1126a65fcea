"""Settings of the process that a model's code depends on without naming them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch

_log = logging.getLogger("oxytorch.tests.of_a_model")


class Numbers(nn.Module):
    """Makes tensors of numbers, which get the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Tensors made in several ways, and what is computed from them."""
        y = self.linear(x)
        made = (torch.tensor(1.5), torch.full((2,), 1.0), torch.linspace(0, 1, 3), torch.tensor(1j))
        return (y, y * torch.tensor(1.5), (x > 0) * 1.5, torch.as_tensor([3.0]), *made)


class Logged(nn.Module):
    """Computes something else where messages are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """A product, doubled while messages for debugging are wanted."""
        y = self.linear(x)
        return y * 2 if _log.isEnabledFor(logging.DEBUG) else y


class Found(Logged):
    """The same, with a logger that it asks for."""

    def forward(self, x: Tensor) -> Tensor:
        """A product, doubled while messages for debugging are wanted."""
        y = self.linear(x)
        log = logging.getLogger("oxytorch.tests.of_a_model")
        return y * 2 if log.isEnabledFor(logging.DEBUG) else y


def _models(module: nn.Module, x: Tensor) -> Iterator[Any]:
    yield oxytorch.optimize(module, sample_input=x)
    yield oxytorch.optimize(module, sample_input=x, graph=True, passes=["program"])


def _same(model: Any, module: nn.Module, x: Tensor) -> None:
    for _ in range(3):
        torch.testing.assert_close(model(x), module(x))


def test_default_dtype() -> None:
    x, module = torch.randn(4, 64), Numbers().eval()
    for model in _models(module, x):
        with torch.no_grad():
            _same(model, module, x)
            torch.set_default_dtype(torch.float64)
            try:
                _same(model, module, x)
            finally:
                torch.set_default_dtype(torch.float32)
            _same(model, module, x)


def _own_level(level: int) -> None:
    _log.setLevel(level)


def _parents_level(level: int) -> None:
    logging.getLogger("oxytorch.tests").setLevel(level)


def _disabled(level: int) -> None:
    logging.getLogger("oxytorch.tests").setLevel(logging.DEBUG)
    logging.disable(logging.CRITICAL if level > logging.DEBUG else logging.NOTSET)


@pytest.mark.parametrize("change", [_own_level, _parents_level, _disabled])
@pytest.mark.parametrize("kind", [Logged, Found])
def test_levels_of_loggers(kind: type[nn.Module], change: Callable[[int], None]) -> None:
    x, module = torch.randn(4, 64), kind().eval()
    for model in _models(module, x):
        try:
            with torch.no_grad():
                for level in (logging.INFO, logging.DEBUG, logging.INFO):
                    change(level)
                    _same(model, module, x)
        finally:
            logging.disable(logging.NOTSET)
            for name in ("oxytorch.tests", _log.name):
                logging.getLogger(name).setLevel(logging.NOTSET)
