"""Exponentials that would be subnormal are zero: processors take a hundred times as long for them.

Masks and saturated activations are full of such exponents.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import LEVELS
from torch import Tensor
from torch.nn import functional as F

from marks import NEEDS_LIBRARY
from oxytorch import isa, ops

pytestmark = NEEDS_LIBRARY

TINY = torch.finfo(torch.float32).tiny
FAR = torch.arange(-103.9, -87.05, 0.05)
"""Of numbers of which the exponential is subnormal in float32."""


def _attention(x: Tensor) -> Tensor:
    query = torch.ones(1, 1, 4, 16, dtype=x.dtype)
    mask = torch.cat([torch.zeros(1, dtype=x.dtype), x]).expand(1, 1, 4, -1)
    return ops.attention(query, *[torch.ones(1, 1, mask.shape[-1], 16, dtype=x.dtype)] * 2, mask)


CALLS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "softmax": (
        lambda x: ops.softmax(torch.cat([x.new_zeros(1), x])[None]),
        lambda x: torch.softmax(torch.cat([x.new_zeros(1), x])[None], -1),
    ),
    "attention": (_attention, lambda x: torch.ones(1, 1, 4, 16, dtype=x.dtype)),
    "silu_mul": (lambda x: ops.silu_mul(x, torch.ones_like(x)), F.silu),
    "gelu_mul": (lambda x: ops.gelu_mul(x / 7, torch.ones_like(x)), lambda x: F.gelu(x / 7)),
    "gelu_mul of tanh": (
        lambda x: ops.gelu_mul(x / 15, torch.ones_like(x), "tanh"),
        lambda x: F.gelu(x / 15, approximate="tanh"),
    ),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_results_are_normal_or_zero(name: str, dtype: torch.dtype, level: str) -> None:
    ours, stock = CALLS[name]
    x = FAR.to(dtype)
    with isa.use(level):
        found = ours(x)
    torch.testing.assert_close(found, stock(x))
    assert not ((found != 0) & (found.abs() < TINY)).any()
    with isa.use(level):
        assert ours(torch.full_like(x, torch.nan)).isnan().any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["softmax", "attention"])
def test_masked_places_count_nothing(name: str, level: str) -> None:
    ours, stock = CALLS[name]
    x = torch.full_like(FAR, -torch.inf)
    with isa.use(level):
        assert torch.equal(ours(x), stock(x))
