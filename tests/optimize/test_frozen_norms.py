"""Batch normalizations of a model's own, whose tensors are buffers (DETR's, torchvision's)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import oxytorch
from oxytorch.graph.recognize import batch_norm_of_module

BF16 = torch.bfloat16


class Frozen(nn.Module):
    def __init__(self, channels: int, eps: float = 1e-3) -> None:
        super().__init__()
        self.eps = eps
        for name in ("weight", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)
        for name in ("bias", "running_mean"):
            self.register_buffer(name, torch.randn(channels))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.reshape(1, -1, 1, 1), self.bias.reshape(1, -1, 1, 1)
        variance = self.running_var.reshape(1, -1, 1, 1)
        mean = self.running_mean.reshape(1, -1, 1, 1)
        scale = weight * (variance + self.eps).rsqrt()
        return x * scale + (bias - mean * scale)


class ReshapedLast(Frozen):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        bias = self.bias - self.running_mean * scale
        return x * scale.reshape(1, -1, 1, 1) + bias.reshape(1, -1, 1, 1)


class OtherRoot(Frozen):
    def forward(self, x: Tensor) -> Tensor:
        scale = (self.weight / (self.running_var.sqrt() + 1e-5)).reshape(1, -1, 1, 1)
        return x * scale + (self.bias - self.running_mean).reshape(1, -1, 1, 1)


class Clamped(Frozen):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(max=40)


class Swapped(Frozen):
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.reshape(1, -1, 1, 1), self.bias.reshape(1, -1, 1, 1)
        scale = weight * (self.running_var.reshape(1, -1, 1, 1) + self.eps).rsqrt()
        return x * scale + (self.running_mean.reshape(1, -1, 1, 1) - bias * scale)


class Block(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = kind(16)
        self.second = nn.Conv2d(16, 16, 3, padding="same")
        self.norm_of_second = kind(16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        return F.relu(self.norm_of_second(self.second(x)) + x)


@pytest.mark.parametrize(
    ("kind", "eps"),
    [(Frozen, 1e-3), (ReshapedLast, 1e-5), (OtherRoot, None), (Clamped, None), (Swapped, None)],
)
def test_recognized_by_formula(kind: Any, eps: float | None) -> None:
    found = batch_norm_of_module(kind(8).eval())
    assert (None if found is None else found.eps) == pytest.approx(eps)


def _close(found: Tensor, expected: Tensor, dtype: torch.dtype | None) -> None:
    tolerance = 1e-4 if dtype is None else 4e-2
    scale = expected.abs().max()
    assert (found.float() - expected).abs().max() <= tolerance * scale


@pytest.mark.parametrize("with_sample", [False, True])
@pytest.mark.parametrize("dtype", [None, BF16])
@pytest.mark.parametrize("kind", [Frozen, ReshapedLast, OtherRoot, Clamped, Swapped])
def test_folded_or_computed_in_one_sweep(
    kind: Any, dtype: torch.dtype | None, with_sample: bool
) -> None:
    stock, x = Block(kind).eval(), torch.randn(2, 3, 10, 10)
    given = {"sample_input": x} if with_sample else {}
    model = oxytorch.optimize(stock, dtype=dtype, **given)  # type: ignore[call-overload]
    passes = {e.pass_name for e in oxytorch.explain(model).applied if "norm" in e.module}
    is_known = kind in (Frozen, ReshapedLast)
    assert ("kernels" in passes) == is_known
    assert ("fold" in passes) == (is_known and with_sample)
    for each in (x, x[:1, :, :7], x.to(memory_format=torch.channels_last)):
        with torch.no_grad():
            found, expected = model(each), stock(each)
        _close(found, expected, dtype)
        assert found.dtype == (dtype or torch.float32)
        assert found.stride() == expected.stride()


@pytest.mark.parametrize("dtype", [None, BF16])
def test_torchs_own_computes_it(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None) -> None:
    calls = []
    own = F.batch_norm

    def counted(*args: Any) -> Tensor:
        calls.append(args[0].dtype)
        return own(*args)

    model = oxytorch.optimize(Block(Frozen).eval(), dtype=dtype)
    monkeypatch.setattr(F, "batch_norm", counted)
    for _ in range(2):
        with torch.no_grad():
            model(torch.randn(2, 3, 10, 10))
    assert calls == [dtype or torch.float32] * 4


@pytest.mark.parametrize("with_sample", [False, True])
def test_changes_are_followed(with_sample: bool) -> None:
    stock, x = Block(Frozen).eval(), torch.randn(2, 3, 10, 10)
    given = {"sample_input": x} if with_sample else {}
    model = oxytorch.optimize(stock, **given)  # type: ignore[call-overload]
    stock = copy.deepcopy(stock)

    def check() -> None:
        with torch.no_grad():
            _close(model(x), stock(x), None)

    check()
    for each in (stock, model):
        each.norm.running_mean.add_(3)
        each.norm_of_second.weight = each.norm_of_second.weight * 2
    check()
    for each in (stock, model):
        each.norm.eps = 2.0
    check()
    for each in (stock, model):
        each.norm.forward = lambda x: x + 1
    check()


def test_gradients_are_the_modules_own() -> None:
    stock, x = Block(Frozen).eval(), torch.randn(2, 3, 10, 10)
    model = oxytorch.optimize(stock)
    stock(x).sum().backward()
    model(x).sum().backward()
    torch.testing.assert_close(model.first.weight.grad, stock.first.weight.grad)


def test_one_dtype_meets_another_as_in_stock() -> None:
    """A model that was not converted by us returns what promotion gives."""
    stock = nn.Sequential(Frozen(4)).eval()
    model = oxytorch.optimize(stock)
    x = torch.randn(1, 4, 3, 3, dtype=BF16)
    with torch.no_grad():
        assert model(x).dtype == stock(x).dtype == torch.float32
        with pytest.raises(RuntimeError):
            model(torch.randn(1, 5, 3, 3))
        torch.testing.assert_close(model(torch.zeros(2, 4, 0, 3)), stock(torch.zeros(2, 4, 0, 3)))
