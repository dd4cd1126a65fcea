"""Calls that have to run a layer's own code: its packed weight is restored once, not at each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import oxytorch
from oxytorch.core.packed import PackedTensor
from oxytorch.core.reordered import ReorderedTensor

pytestmark = pytest.mark.usefixtures("pack_small_layers")

WAYS: dict[str, Callable[[], Any]] = {
    "gradients": nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": torch.inference_mode,
}


def _layers() -> dict[str, tuple[nn.Module, Any]]:
    return {
        "linear": (nn.Linear(192, 192), torch.rand(4, 192)),
        "conv1d": (nn.Conv1d(16, 16, 3), torch.rand(2, 16, 20)),
        "conv2d": (nn.Conv2d(16, 16, 3), torch.rand(2, 16, 9, 9)),
        "lstm": (nn.LSTM(16, 16, num_layers=2, bidirectional=True), torch.rand(5, 2, 16)),
        "packed sequence": (nn.LSTM(16, 16), pack_sequence([torch.rand(5, 16), torch.rand(3, 16)])),
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", _layers())
def test_weights_are_restored_once(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = _layers()[name]
    layer.eval()
    sample = torch.rand(5, 2, 16) if name == "packed sequence" else x
    model = oxytorch.optimize(layer, sample_input=sample)
    assert any(isinstance(p, PackedTensor) for p in model.parameters())
    with WAYS[way]():
        wanted, first = layer(x), model(x)
        restored = []
        monkeypatch.setattr(ReorderedTensor, "restore", lambda self: restored.append(self))
        second = model(x)
    assert not restored
    for output in (first, second):
        torch.testing.assert_close(output, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore:Converting a tensor:torch.jit.TracerWarning")
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", [name for name in _layers() if name != "packed sequence"])
def test_packed_layers_are_traced(name: str, gradients: bool) -> None:
    torch.manual_seed(0)
    layer, x = _layers()[name]
    model = oxytorch.optimize(layer.eval(), sample_input=x)
    with torch.set_grad_enabled(gradients):
        traced = torch.jit.trace(model, x)
    assert {*traced.state_dict()} == {*layer.state_dict()}
    torch.testing.assert_close(traced(x), layer(x), rtol=2e-5, atol=2e-6)
