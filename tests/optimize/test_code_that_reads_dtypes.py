"""Code that reads dtypes sees those that its tensors have, whenever these change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from oxytorch.optimize import DEFAULT
from oxytorch.optimize.passes import whole

BF16 = torch.bfloat16


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.query = nn.Linear(64, 64)
        self.fused = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


class BackToTheDtype(_Layers):
    def forward(self, ids: Tensor) -> Tensor:
        y = self.fused(self.embedding(ids))
        return y.float().tanh().to(y.dtype)


class SoftmaxInFloat32(_Layers):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.query(self.embedding(ids))
        return self.fused(torch.softmax(x, -1, dtype=torch.float32).to(x.dtype))


class MaskOfTheDtype(_Layers):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        mask = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
        return self.fused((mask + x @ x.transpose(1, 2)).softmax(-1) @ x)


class DtypeOfAWeight(_Layers):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).float() * 2
        return self.fused(x.to(self.fused[0].weight.dtype))


class BranchOnTheDtype(_Layers):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.fused(self.embedding(ids))
        return x * 2 if x.dtype == torch.float32 else x * 3


CLASSES = (BackToTheDtype, SoftmaxInFloat32, MaskOfTheDtype, DtypeOfAWeight, BranchOnTheDtype)


def _model(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def _same(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("with_sample", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_converted_models_read_their_own_dtypes(kind: type[nn.Module], with_sample: bool) -> None:
    model, ids = _model(kind), torch.randint(50, (2, 16))
    given: dict[str, Any] = {"sample_input": ids} if with_sample else {}
    fast = oxytorch.optimize(model, dtype=BF16, **given)
    with torch.no_grad():
        _same(fast(ids), copy.deepcopy(model).to(BF16)(ids))
        _same(fast.float()(ids), model.to(BF16).float()(ids))


@pytest.mark.parametrize("kind", CLASSES)
def test_models_that_are_converted_later_read_their_own_dtypes(kind: type[nn.Module]) -> None:
    model, ids = _model(kind), torch.randint(50, (2, 16))
    passes = [*DEFAULT]
    fast = oxytorch.optimize(model, sample_input=ids, passes=passes)
    is_fused = any(e.pass_name == "fuse" for e in oxytorch.explain(fast).applied)
    assert is_fused or kind is DtypeOfAWeight  # which is the module's own tensor
    with torch.no_grad():
        _same(fast(ids), model(ids))
        _same(fast.to(BF16)(ids), model.to(BF16)(ids))
        _same(fast.float()(ids), model.float()(ids))


LAYERS = {
    "attention": (lambda: nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), (2, 5, 32)),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2),
        (2, 5, 32),
    ),
    "gru": (lambda: nn.GRU(32, 16), (5, 2, 32)),
    "lstm": (lambda: nn.LSTM(32, 16), (5, 2, 32)),
    "projected": (lambda: nn.LSTM(32, 16, proj_size=4), (5, 2, 32)),
    "cell": (lambda: nn.GRUCell(32, 16), (5, 32)),
}


def _first(found: Any) -> Tensor:
    while isinstance(found, tuple):
        found = found[0]
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("with_sample", [False, True])
@pytest.mark.parametrize("wins", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_take_both_dtypes_and_follow_later_ones(
    monkeypatch: pytest.MonkeyPatch, name: str, wins: bool, with_sample: bool, outside: bool
) -> None:
    monkeypatch.setattr(whole, "first_win", lambda key, sizes: 0 if wins else None)
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer, x = make().eval(), torch.randn(shape)
    model = nn.Sequential(layer) if outside and name in ("attention", "encoder") else layer
    given: dict[str, Any] = {"sample_input": x} if with_sample else {}
    fast = oxytorch.optimize(model.eval(), dtype=BF16, **given)
    wanted = _first(layer(x))
    with torch.no_grad():
        for dtype in (torch.float32, BF16):
            torch.testing.assert_close(
                _first(fast(x.to(dtype))).float(), wanted, rtol=5e-2, atol=5e-2
            )
        for dtype in (torch.float32, torch.float64, BF16):
            fast.to(dtype)
            found = _first(fast(x.to(dtype)))
            assert found.dtype == dtype
            torch.testing.assert_close(found.float(), wanted, rtol=5e-2, atol=5e-2)
