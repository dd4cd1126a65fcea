"""The small model and what it reads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from small_model import Small

from oxytorch.rewriting import measure


@pytest.fixture(autouse=True)
def all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests are small; their layers become bytes whatever was timed."""
    monkeypatch.setattr(measure, "TIMED", False)


@pytest.fixture
def small() -> nn.Module:
    return Small().eval()


@pytest.fixture
def make_small() -> Callable[[], nn.Module]:
    return lambda: Small().eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
