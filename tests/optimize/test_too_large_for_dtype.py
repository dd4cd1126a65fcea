"""Inputs that are finite in float32 and infinite in the dtype that they are converted to."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from oxytorch.optimize.verify import VerificationError


class Attention(nn.Module):
    """Written out, with a mask that the caller gives."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(1, 2) / 8 + mask).softmax(-1) @ v


def inputs(fill: float) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    mask = torch.zeros(2, 6, 6)
    mask[1] = fill
    return torch.randn(2, 6, 64), mask


def test_sample_whose_mask_becomes_infinite_warns() -> None:
    sample = inputs(torch.finfo(torch.float32).min)
    with pytest.warns(UserWarning, match=r"argument 1 has finite values .* infinite in"):
        oxytorch.optimize(Attention().eval(), sample_input=sample, dtype=torch.bfloat16)


@pytest.mark.parametrize("fill", [torch.finfo(torch.bfloat16).min, -float("inf"), -1e9])
def test_other_masks_do_not_warn(fill: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        oxytorch.optimize(Attention().eval(), sample_input=inputs(fill), dtype=torch.bfloat16)


def test_verify_tells_of_values_that_are_not_finite() -> None:
    sample = inputs(torch.finfo(torch.float32).min)
    with (
        pytest.warns(UserWarning, match="fill masks"),
        pytest.raises(VerificationError, match="has NaN, infinities or a shape"),
    ):
        oxytorch.optimize(
            Attention().eval(), sample_input=sample, dtype=torch.bfloat16, verify=True
        )
