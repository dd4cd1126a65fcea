"""A layer that is loaded from a checkpoint, and what is compared then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import packers
import torch
from torch import nn
from torch.nn import functional as F

import oxytorch

OUT, IN = 48, 256


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(IN, OUT)


BIAS = torch.arange(OUT, dtype=torch.float32) / 16


def loaded(tmp_path: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> nn.Linear:
    directory = packers.write(tmp_path / "model", {**tensors, "fc.bias": BIAS}, settings)
    model = oxytorch.load_quantized(directory, Layer)
    assert isinstance(model, Layer)
    return model.fc


def check(layer: nn.Linear, wanted: torch.Tensor) -> None:
    """The plain weight is exact, and the layer multiplies with it."""
    assert torch.equal(layer.weight.dense(), wanted)  # type: ignore[operator]
    assert torch.equal(layer.state_dict()["weight"], wanted)
    x = torch.randn(3, IN)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), F.linear(x, wanted, BIAS), rtol=1e-3, atol=1e-3)


def without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def replaced(name: str, change: Any) -> Any:
    return lambda tensors: tensors.update({name: change(tensors[name])})
