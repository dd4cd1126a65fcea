"""The first checks of the whole way: class, op, kernel, formats, checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oxytorch.optim import AdamW, formats

SHAPES = [(100, 33), (7,), (), (64, 80), (3, 5, 7, 2), (0, 4)]


def _weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _train(optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[Tensor]:
    parameters = optimizer.param_groups[0]["params"]
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return list(parameters)


def test_split_equals_float32_bit_for_bit() -> None:
    expected = _train(AdamW(_weights(), lr=0.01), 20)
    halves = [formats.split(weight) for weight in _weights()]
    optimizer = AdamW([upper for upper, _ in halves], lr=0.01, master_weights="split")
    for (upper, _), weight in zip(halves, _weights(), strict=True):
        optimizer.set_master_weight(upper, weight)
    for parameter, wanted in zip(_train(optimizer, 20), expected, strict=True):
        assert torch.equal(optimizer.master_weight(parameter), wanted)


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, torch.int8])
def test_checkpoint_continues_identically(state_dtype: torch.dtype | None) -> None:
    whole = AdamW(_weights(), lr=0.01, state_dtype=state_dtype)
    expected = _train(whole, 10)
    first = AdamW(_weights(), lr=0.01, state_dtype=state_dtype)
    weights = _train(first, 5)
    second = AdamW([w.clone() for w in weights], lr=0.01, state_dtype=state_dtype)
    second.load_state_dict(first.state_dict())
    for actual, wanted in zip(_train(second, 5, first=5), expected, strict=True):
        assert torch.equal(actual, wanted)
