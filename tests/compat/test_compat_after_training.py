"""A model that `optimize` prepared for training is optimized for inference afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from oxytorch.compat import ipex


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_inference_after_training(dtype: torch.dtype | None, inplace: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = ipex.optimize(model, optimizer=optimizer, dtype=dtype)
    x, target = torch.randn(16, 64), torch.randint(10, (16,))
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            nn.functional.cross_entropy(model(x).float(), target).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        expected = copy.deepcopy(model)(x).float()
        ours = ipex.optimize(model, dtype=dtype, inplace=inplace)
        found = ours(x.to(dtype or torch.float32))
    assert (ours is model) == inplace
    limit = 0.05 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.float(), expected, rtol=limit, atol=limit)


def test_optimizing_twice_for_inference() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).eval(), torch.randn(4, 64)
    once = ipex.optimize(model)
    twice = ipex.optimize(once)
    with torch.no_grad():
        torch.testing.assert_close(twice(x), model(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(once(x), model(x), rtol=1e-5, atol=1e-5)
