"""Conversions, moves and written weights under `torch.inference_mode()` are those outside of it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import oxytorch
from oxytorch.quantization import Int8Weight


def _written(model: nn.Module) -> None:
    model[0].weight.data = torch.full((1536, 384), 0.01, dtype=model[0].weight.dtype)


def _there_and_back(model: nn.Module) -> None:
    model.double()
    model.float()


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "to device": lambda model: model.to("cpu"),
    "cpu": nn.Module.cpu,
    "float": nn.Module.float,
    "bfloat16": nn.Module.bfloat16,
    "there and back": _there_and_back,
    "data": _written,
}


@pytest.mark.usefixtures("pack_small_layers")
@pytest.mark.parametrize("calls_first", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ["default", "sample", "graph", "bfloat16", "int8"])
def test_change_under_inference_mode(way: str, change: str, calls_first: bool) -> None:
    stock = nn.Sequential(nn.Linear(384, 1536), nn.GELU(), nn.Linear(1536, 32)).eval()
    x = torch.randn(5, 384)
    dtype = torch.bfloat16 if way == "bfloat16" else torch.float32
    stock.to(dtype)
    if way == "int8":
        ours = copy.deepcopy(stock)
        oxytorch.quantize_(ours, Int8Weight())
    else:
        more = {} if way == "default" else {"sample_input": x.to(dtype), "graph": way == "graph"}
        ours = oxytorch.optimize(stock, dtype=dtype, **more)
    with torch.inference_mode():
        if calls_first:
            ours(x.to(dtype))
        CHANGES[change](stock)
        CHANGES[change](ours)
        given = x.to(stock[0].weight.dtype)
        expected, found = stock(given), ours(given)
    with torch.no_grad():
        later = ours(given.clone())
    assert found.dtype == expected.dtype
    limit = 0.05 if expected.dtype == torch.bfloat16 or way == "int8" else 1e-5
    for each in (found, later):
        torch.testing.assert_close(each, expected, rtol=limit, atol=limit)
