"""A small model with split weights, for the tests of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import oxytorch
from oxytorch import optim


class Network(nn.Module):
    """Layers, a norm that stays float32, and parameters that the author uses by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
        self.projection = nn.Parameter(torch.randn(8, 8) / 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(x) @ self.projection.to(self.body[3].weight.dtype))
        return scores


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def pair(**options: Any) -> tuple[Any, Any]:
    model = network()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, **options)
    return oxytorch.optimize(model, optimizer=optimizer, dtype=torch.bfloat16, inplace=True)


def step(model: nn.Module, *optimizers: Any, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)
    model.zero_grad()
    F.cross_entropy(model(x).float(), y).backward()
    for optimizer in optimizers:
        optimizer.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


def assert_weights(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32, name
        assert torch.equal(value, wanted[name]), name
