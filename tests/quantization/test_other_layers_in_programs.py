"""Recurrent layers and embedding bags of bytes in programs, traces and static quantization."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from marks import NEEDS_LIBRARY
from oxytorch.ops.quantized_embedding_bag import pack_rows, quantized_embedding_bag
from oxytorch.program.passes import recurrent
from oxytorch.quantization import (
    Int8DynamicActivationInt8Weight,
    Int8StaticActivationInt8Weight,
    recipe_of,
)
from oxytorch.rewriting import measure

pytestmark = NEEDS_LIBRARY

DYNAMIC = Int8DynamicActivationInt8Weight(only_faster=False)


@pytest.fixture(autouse=True)
def _all_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TIMED", False)


class Sequences(nn.Module):
    """A recurrent layer and a linear one."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer = kind(32, 48, batch_first=True)
        self.head = nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layer(x)[0])
        return result


class Tables(nn.Module):
    """Bags of bytes of three tables, of which the last has other rows."""

    def __init__(self) -> None:
        super().__init__()
        for number, size in enumerate(((50, 16), (30, 16), (40, 24))):
            self.register_buffer(f"rows{number}", pack_rows(torch.randn(size)))

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        tables: list[Any] = [self.rows0, self.rows1, self.rows2]
        return torch.cat([quantized_embedding_bag(rows, indices, offsets) for rows in tables], 1)


def call(module: Any, *args: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = module(*args)
        return result


def error(actual: Tensor, wanted: Tensor) -> float:
    return float((actual - wanted).norm() / wanted.norm())


def calls_of(module: Any, *args: Tensor) -> list[str]:
    """The operators that a call runs, as often as it does."""
    call(module, *args)
    with torch.profiler.profile() as profile:
        call(module, *args)
    return [event.name for event in profile.events()]


def test_bags_of_bytes_of_several_tables_are_looked_up_in_one_sweep() -> None:
    torch.manual_seed(0)
    model = Tables().eval()
    given = torch.randint(30, (20,)), torch.tensor([0, 5, 5, 12])
    compiled = torch.compile(model, backend="oxytorch")
    assert torch.equal(call(compiled, *given), call(model, *given))
    names = calls_of(compiled, *given)
    assert names.count("oxytorch::quantized_merged_embedding_bag") == 1
    assert names.count("oxytorch::quantized_embedding_bag") == 1


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("only_faster", [False, True])
def test_static_quantization_of_recurrent_layers(kind: Any, only_faster: bool) -> None:
    torch.manual_seed(0)
    model = Sequences(kind).eval()
    batches = [torch.randn(2, 5, 32) for _ in range(3)]
    config = Int8StaticActivationInt8Weight(only_faster=only_faster)
    quantized = oxytorch.quantize(model, batches, config)
    assert error(call(quantized, batches[0]), call(model, batches[0])) < 0.03
    longer = torch.randn(3, 7, 32)
    assert error(call(quantized, longer), call(model, longer)) < 0.03
    if kind is nn.LSTM:
        assert recipe_of(quantized).layers["layer"].compute == "dynamic"
        assert "oxytorch::quantized_lstm" in calls_of(quantized, batches[0])


def test_recurrent_layers_that_are_not_faster_stay_floating(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recurrent, "pays", lambda layer: False)
    batches = [torch.randn(2, 5, 32) for _ in range(3)]
    model = Sequences(nn.LSTM).eval()
    quantized = oxytorch.quantize(model, batches)
    own = recipe_of(quantized).layers["layer"]
    assert (own.compute, own.note) == ("float", recurrent.SLOWER)
    assert recurrent.SLOWER in str(oxytorch.explain(quantized))
    assert "oxytorch::quantized_lstm" not in calls_of(quantized, batches[0])


def test_static_quantization_leaves_bags_floating() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(40, 16, mode="sum"), nn.Linear(16, 8)).eval()
    batches = [torch.randint(40, (4, 6)) for _ in range(3)]
    quantized = oxytorch.quantize(model, batches)
    assert list(recipe_of(quantized).layers) == ["1"]
    assert error(call(quantized, batches[0]), call(model, batches[0])) < 0.03


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_traces_and_exports_are_of_the_rounded_weights(kind: Any) -> None:
    torch.manual_seed(0)
    model = Sequences(kind).eval()
    oxytorch.quantize_(model, DYNAMIC)
    x = torch.randn(2, 5, 32)
    # With gradients the layers' own code runs, on activations as they are in recurrent layers.
    wanted = model(x).detach()
    with torch.no_grad():
        exported = torch.export.export(copy.deepcopy(model), (x,)).module()
        traced = torch.jit.trace(copy.deepcopy(model), (x,))
    for other in (exported, traced):
        torch.testing.assert_close(call(other, x), wanted, rtol=1e-4, atol=1e-5)
