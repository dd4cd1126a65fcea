"""Mistakes that newcomers make end with what to do in their place."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from oxytorch.aot import chosen_kernels
from oxytorch.quantization import Int4Weight, Int8Weight


class OfOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return self.linear(features["x"])


class OfTwo(OfOne):
    def forward(self, first: Tensor, second: Tensor) -> Tensor:  # type: ignore[override]
        return self.linear(first) + second


X = torch.randn(2, 4)


@pytest.mark.parametrize(
    ("model", "sample", "way"),
    [
        (OfOne(), {"x": X}, "(sample_input,), the mapping as its one argument"),
        (OfTwo(), {"input": X, "other": X}, "tuple(sample_input.values())"),
        (nn.Linear(4, 4), (X, torch.tensor([1])), "sample_input[0]"),
        (OfTwo(), ((X, X),), "the inner tuple"),
        (OfTwo(), ({"first": X, "second": X},), "the mapping alone"),
        (nn.Conv2d(3, 3, 1), torch.rand(3, 4), "give a tensor, a tuple"),
    ],
)
def test_sample_of_another_structure_suggests_the_right_one(
    model: nn.Module, sample: Any, way: str
) -> None:
    with pytest.raises(ValueError, match="sample_input does not fit") as raised:
        oxytorch.optimize(model.eval(), sample_input=sample)
    assert way in str(raised.value)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Conv2d(3, 3, 1)), "oxytorch.quantize takes convolutions"),
        (nn.ReLU(), "no linear layer"),
    ],
)
def test_quantizing_nothing_warns(model: nn.Module, reason: str) -> None:
    with pytest.warns(UserWarning, match="nothing of") as found:
        oxytorch.quantize_(model, Int8Weight())
    assert reason in str(found[0].message) and found[0].filename == __file__


def test_quantizing_something_or_once_more_does_not_warn() -> None:
    model = nn.Sequential(nn.Linear(128, 128))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        oxytorch.quantize_(model, Int4Weight())
        oxytorch.quantize_(model, Int4Weight())


@pytest.mark.parametrize(
    ("text", "only", "rules"),
    [
        ("", [], []),
        ("adamw", [], ["adam"]),
        ("AdamW, clip_grad_norm_", ["squares", "norm"], ["adam"]),
        ("adafactor", ["factor_sums", "factors"], ["adafactor"]),
        ("update", ["update"], []),
    ],
)
def test_kernels_are_chosen_by_names_that_users_know(
    text: str, only: list[str], rules: list[str]
) -> None:
    assert chosen_kernels(text) == (only, rules)


def test_unknown_kernels_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"adamw.*clip_grad_norm_.*update"):
        chosen_kernels("adamwx")
