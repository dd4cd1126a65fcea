"""Rows all of whose keys are hidden by the lowest number of a dtype: padding, in most models.

All scores of such a row are that number, so that each key has the same weight.
"""

from __future__ import annotations

import pytest
import torch
from harness import LEVELS
from torch import Tensor

from marks import NEEDS_LIBRARY
from oxytorch import isa, ops

pytestmark = NEEDS_LIBRARY

DTYPES = (torch.float32, torch.bfloat16)


def _mask(dtype: torch.dtype, keys: int) -> Tensor:
    """The first text has three tokens, whose keys and whose rows alone are shown."""
    mask = torch.zeros(2, 1, 9, keys, dtype=dtype)
    lowest = torch.finfo(dtype).min
    mask[0, :, :, 3:] = lowest
    mask[0, :, 3:] = lowest
    return mask


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [9, 40, 700])
@pytest.mark.parametrize("is_of_head", [False, True])
def test_attention(keys: int, dtype: torch.dtype, level: str, is_of_head: bool) -> None:
    query = torch.randn(2, 4, 9, 16, dtype=dtype)
    key, value = (torch.randn(2, 4, keys, 16, dtype=dtype) for _ in range(2))
    mask = _mask(dtype, keys)
    if is_of_head:  # with positions, as models with biases for distances add them
        mask = mask + torch.randn(2, 4, 9, keys, dtype=dtype)
    with isa.use(level):
        found = ops.attention(query, key, value, mask, 0.3)
    scores = (query.float() @ key.float().mT) * 0.3 + mask.float()
    expected = scores.softmax(-1) @ value.float()
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [9, 40, 9000])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("is_added", [False, True])
def test_softmax(width: int, dtype: torch.dtype, level: str, scale: float, is_added: bool) -> None:
    x, mask = torch.randn(2, 4, 9, width, dtype=dtype), _mask(dtype, width)
    if not is_added:  # scores that were replaced before
        x, mask = x.masked_fill(mask < 0, torch.finfo(dtype).min), torch.zeros(1, dtype=dtype)
    with isa.use(level):
        found = ops.softmax(x, scale, mask if is_added else None)
    expected = (x.float() * scale + mask.float()).softmax(-1)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
