"""Biases that are no vector in one piece of memory, which oneDNN takes for granted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch

ROWS, IMAGE, LINE = torch.randn(4, 512), torch.randn(2, 16, 20, 20), torch.randn(2, 64, 40)


def _linear() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 256)), ROWS


def _apart() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(512, 1024), nn.Identity(), nn.Linear(1024, 256)), ROWS


def _convolutions() -> tuple[nn.Module, Tensor]:
    layers = nn.Conv2d(16, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3, groups=64), nn.Conv2d(64, 32, 1)
    return nn.Sequential(*layers), IMAGE


def _transposed() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.ConvTranspose2d(16, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3)), IMAGE


def _lines() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Conv1d(64, 64, 3), nn.ReLU(), nn.Conv1d(64, 64, 3)), LINE


def _lstm() -> tuple[nn.Module, Tensor]:
    return nn.LSTM(64, 128), torch.randn(7, 3, 64)


MODELS = [_linear, _apart, _convolutions, _transposed, _lines, _lstm]
WAYS: dict[str, Any] = {
    "default": {},
    "sample": {"sample_input": None},
    "graph": {"sample_input": None, "graph": True},
    "program": {"sample_input": None, "passes": ["program"]},
}


def _scatter(model: nn.Module, replaces: bool) -> None:
    """Every second number of a stretch whose others are huge."""
    for module in model.modules():
        for name, parameter in [*module._parameters.items()]:
            if parameter is None or parameter.dim() != 1:
                continue
            stretch = torch.full((2 * len(parameter),), 1e30)
            stretch[::2] = parameter.detach() * 3 + 0.3
            if replaces:
                setattr(module, name, nn.Parameter(stretch[::2]))
            else:
                parameter.data = stretch[::2]


@pytest.mark.parametrize("when", ["before", "replaced", "data"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__.strip("_"))
@pytest.mark.usefixtures("pack_small_layers")
def test_scattered_biases(make: Callable[[], tuple[Any, Tensor]], way: str, when: str) -> None:
    for inplace in (False, True):
        torch.manual_seed(0)
        model, x = make()
        stock = copy.deepcopy(model.eval())
        if when == "before":
            _scatter(model, True)
            _scatter(stock, True)
        options = {name: x if value is None else value for name, value in WAYS[way].items()}
        optimized = oxytorch.optimize(model, inplace=inplace, **options)
        with torch.no_grad():
            optimized(x)
            if when != "before":
                _scatter(optimized, when == "replaced")
                _scatter(stock, when == "replaced")
            for _ in range(3):
                found, wanted = optimized(x), stock(x)
                if isinstance(wanted, tuple):
                    found, wanted = found[0], wanted[0]
                torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
