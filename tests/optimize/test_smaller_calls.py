"""What a sample's passes gain, and a much smaller call does not, that call goes without."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oxytorch
from oxytorch.graph.forward import first_numel
from oxytorch.graph.region import Region
from oxytorch.optimize.passes import attention, rewrite
from oxytorch.rewriting import measure

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return self.norm(x + self.out(mixed))  # type: ignore[no-any-return]


def _forwards(model: nn.Module, kind: type) -> list[Any]:
    found = (module.__dict__.get("forward") for module in model.modules())
    found = (getattr(each, "inner", each) if kind is Region else each for each in found)
    return [each for each in found if isinstance(each, kind)]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Optimized with a sample of 64 sequences of 32; attention pays by these times."""
    torch.manual_seed(0)
    monkeypatch.setattr(measure, "TIMED", True)
    monkeypatch.setattr(attention, "is_fast", lambda: True)
    monkeypatch.setattr(attention, "first_win", lambda *_: 0)
    monkeypatch.setattr(measure, "seconds_of", lambda *_: (1e-4, 1.1e-3, 2e-3))
    block = nn.Sequential(Block()).eval()
    names = ("fuse", "attention")
    sample = torch.randn(64, 32, WIDTH)
    return oxytorch.optimize(block, sample_input=sample, passes=names)


def test_attention_begins_where_it_spares_what_the_mode_takes(model: nn.Module) -> None:
    (found,) = _forwards(model, attention.AttentionForward)
    assert found.least == 64 * 32 * WIDTH // 10  # the mode takes a tenth of what is spared


def test_sums_in_float32_begin_where_they_pay(model: nn.Module) -> None:
    (region,) = _forwards(model, Region)
    assert [program.least for program in region.programs] == [rewrite.LEAST]


@pytest.mark.parametrize("batch", [1, 4, 23, 24, 64, 100])
def test_answers_are_those_of_the_model_below_and_above(model: nn.Module, batch: int) -> None:
    stock = oxytorch.undo(copy.deepcopy(model))
    assert _forwards(model, Region) and not _forwards(stock, Region)
    x = torch.randn(batch, 32, WIDTH)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), stock(x), rtol=1e-4, atol=1e-5)


def test_a_sample_smaller_than_that_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TIMED", True)
    x = torch.randn(1, 4, WIDTH)
    block = nn.Sequential(Block()).eval()
    model = oxytorch.optimize(block, sample_input=x, passes=("fuse",))
    (region,) = _forwards(model, Region)
    (program,) = region.programs
    assert program.least == x.numel()
    assert program.matches((x,), {}) and not program.matches((x[:, :3],), {})


def test_the_first_tensor_is_found_wherever_it_stands() -> None:
    x = torch.ones(3, 5)
    assert first_numel((x, None), {}) == first_numel((), {"x": x}) == 15
    assert first_numel((None, [x]), {}) == first_numel((), {"a": 1, "b": (x,)}) == 15
    assert first_numel((), {}) == first_numel((None,), {"y": 2}) == 0
