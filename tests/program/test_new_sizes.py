"""Calls of new sizes of a program: what fails while one is looked for is not the caller's error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from oxytorch.program import families


class Grown(nn.Module):
    """Joins a constant that its code makes to what it computes, as an empty cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        grown = torch.cat([torch.tensor([], dtype=hidden.dtype), hidden], dim=-2)
        return self.last(grown.relu()), grown


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_new_sizes_with_constants_of_the_code(mode: Any) -> None:
    torch.manual_seed(0)
    model = Grown().eval()
    x = torch.randn(8, 20, 64)
    optimized = oxytorch.optimize(model, sample_input=x, graph=True, passes=["program"])
    with mode():
        for batch, length in [(1, 9), (1, 5), (3, 40), (7, 17), (2, 6)]:
            for _ in range(2):
                x = torch.randn(batch, length, 64)
                torch.testing.assert_close(optimized(x), model(x), rtol=1e-4, atol=1e-5)


class Shifted(nn.Module):
    """Numbers of Python's as tensors, which inference mode makes by one operator more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.tensor([0.5, 2.0])
        return self.last((self.first(x * both[0]) + torch.tensor(0.25)).relu().detach_()) * both[1]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_new_sizes_run_at_once_where_code_makes_tensors_of_numbers(mode: Any) -> None:
    torch.manual_seed(0)
    model = Shifted().eval()
    optimized = oxytorch.optimize(
        model, sample_input=torch.randn(8, 20, 64), graph=True, passes=["program"]
    )
    with mode():
        for batch, length in [(1, 9), (5, 4), (3, 40), (7, 17), (2, 6)]:
            x = torch.randn(batch, length, 64)
            for _ in range(2):
                torch.testing.assert_close(optimized(x), model(x), rtol=1e-4, atol=1e-5)
    lines = "\n".join(oxytorch.explain(optimized).calls)
    assert "not checked for other sizes" not in lines and "checked for other sizes: new" in lines


class Detaching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.detach_())


def test_an_input_that_code_detaches_is_detached_at_each_call() -> None:
    model = Detaching().eval()
    optimized = oxytorch.optimize(model, sample_input=torch.randn(8, 64), passes=["program"])
    with torch.inference_mode():
        for _ in range(4):
            with torch.inference_mode(False):
                x = torch.randn(8, 64, requires_grad=True)
            torch.testing.assert_close(optimized(x), model(x), rtol=1e-4, atol=1e-5)
            with torch.inference_mode(False):
                own, other = (torch.randn(8, 64, requires_grad=True) for _ in range(2))
            optimized(own), model(other)
            assert own.requires_grad == other.requires_grad


def test_what_fails_while_sizes_are_joined_is_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).eval()
    x = torch.randn(8, 16)
    optimized = oxytorch.optimize(model, sample_input=x, graph=True, passes=["program"])

    def failing(*args: Any) -> None:
        raise KeyError("val")

    monkeypatch.setattr(families, "_joins", failing)
    with torch.no_grad():
        for rows in (3, 5, 3, 7, 5):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(optimized(x), model(x), rtol=1e-4, atol=1e-5)
