"""Packed weights of convolutions for inputs of other sizes than the usual one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from oxytorch.ops import convolution as own
from oxytorch.ops.convolution import Geometry, PackedConvolutionWeight, convolution


def packed(groups: int = 8, dims: int = 2) -> tuple[nn.Module, PackedConvolutionWeight]:
    kind: Any = nn.Conv1d if dims == 1 else nn.Conv2d
    layer = kind(64, 128, 3, padding=1, groups=groups)
    ones = (1,) * dims
    geometry = Geometry(ones, ones, ones, groups)
    size = (1, 64, *(8,) * dims)
    return layer, PackedConvolutionWeight(layer.weight.detach(), geometry, input_size=size)


def check(layer: Any, weight: PackedConvolutionWeight, batch: int) -> None:
    x = torch.randn(batch, 64, *[8] * (weight.dim() - 2))
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(
                convolution(x, weight, layer.bias), layer(x), rtol=1e-4, atol=1e-4
            )


def orders_of(weight: PackedConvolutionWeight) -> list[torch.Tensor]:
    return [*weight._current().for_sizes.values()]


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("groups", [1, 8, 64])
@pytest.mark.parametrize("other_wins", [False, True])
def test_answers_are_torchs_in_every_order(
    dims: int, groups: int, other_wins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, weight = packed(groups, dims)
    usual = weight.packed
    monkeypatch.setattr(own, "_seconds", lambda call, order: 2.0 if order is usual else 1.0)
    if not other_wins:
        monkeypatch.setattr(own, "_seconds", lambda call, order: 1.0)
    before = weight.nbytes_packed()
    for batch in (1, 3, 33, 1):
        check(layer, weight, batch)
    assert [order is usual for order in orders_of(weight)] == [not other_wins] * 2
    assert (weight.nbytes_packed() > before) == other_wins


def test_each_size_is_timed_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Tensor] = []
    monkeypatch.setattr(own, "_seconds", lambda call, order: float(calls.append(order) is None))
    layer, weight = packed()
    for batch in (*range(1, 40), *range(1, 40)):
        check(layer, weight, batch)
    assert len(calls) == 2 * own.MOST_SIZES == 2 * len(orders_of(weight))


def test_one_other_order_is_kept_of_a_large_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, weight = packed()
    usual = weight.packed
    monkeypatch.setattr(own, "MOST_OF_SIZES", 1)
    monkeypatch.setattr(own, "_seconds", lambda call, order: 2.0 if order is usual else 1.0)
    for batch in (2, 3, 4):
        check(layer, weight, batch)
    assert [order is usual for order in orders_of(weight)] == [False, True, True]


def test_new_values_are_ordered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, weight = packed()
    usual = weight.packed
    monkeypatch.setattr(own, "_seconds", lambda call, order: 2.0 if order is usual else 1.0)
    check(layer, weight, 3)
    with torch.no_grad():
        layer.weight.mul_(2)
    weight.repack(layer.weight.detach())
    assert orders_of(weight) == []
    check(layer, weight, 3)
    check(layer, weight, 1)
