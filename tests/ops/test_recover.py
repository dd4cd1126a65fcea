"""Values that were rounded to a format are found again, whatever the scales are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import oxytorch
from marks import NEEDS_LIBRARY
from oxytorch.ops.panels.recover import recovered
from oxytorch.quantization import Float8Weight, Int4Weight, Int8Weight, NF4Weight

CONFIGS = [
    Int8Weight(),
    Int8Weight(symmetric=False),
    Int8Weight(group_size=64),
    Int4Weight(group_size=None),
    Int4Weight(),
    Int4Weight(symmetric=False),
    Int4Weight(group_size=32, symmetric=False, search=False),
    NF4Weight(),
    Float8Weight(),
    Float8Weight(block_size=(128, 128)),
]


def _layer(dtype: torch.dtype) -> Any:
    layer = nn.Linear(256, 144, bias=False).to(dtype).eval()
    layer.weight.data.normal_()
    layer.weight.data[3] = 0
    layer.weight.data[4] *= 1e-3
    return layer


@NEEDS_LIBRARY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_another_model_loads_the_very_values(config: Any, dtype: torch.dtype) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        first, second = _layer(dtype), _layer(dtype)
        oxytorch.quantize_(first, config)
        oxytorch.quantize_(second, config)
        state = copy.deepcopy(first.state_dict())
        second.load_state_dict(state)
        with torch.no_grad():
            second(torch.randn(2, 256, dtype=dtype))
        assert second.weight.is_packed()
        assert torch.equal(second.weight.dense(), state["weight"])


def test_values_that_were_not_rounded_are_not_found() -> None:
    values = torch.randn(4, 64)
    for format in ("int8", "int4", "nf4", "fp8"):
        found = recovered(format, values, 32, True, True)[3]
        assert found.shape == (4, 2) and not found.any()


def test_groups_are_found_by_themselves() -> None:
    rounded = torch.randint(0, 16, (2, 32)).float().sub(5).mul(0.37)
    values = torch.cat([rounded, torch.randn(2, 32)], 1)
    codes, scales, zero_points, found = recovered("int4", values, 32, False, False)
    assert found.tolist() == [[True, False]] * 2
    own = (codes[:, :32].float() - zero_points[:, :1]) * scales[:, :1]
    assert torch.equal(own, rounded)


def test_values_that_are_not_finite_are_not_found() -> None:
    values = torch.full((2, 32), 0.5)
    values[0, 3], values[1, 7] = float("nan"), float("inf")
    for format in ("int8", "int4", "nf4", "fp8"):
        assert not recovered(format, values, 32, True, True)[3].any()
