"""Inputs of the wrong structure, in calibration too: the error says what the model takes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from oxytorch.quantization import prepare

X = torch.ones(2, 8)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)


class Two(Base):
    def forward(self, first: Tensor, second: Tensor, scale: float = 1.0) -> Tensor:
        return self.line(first) + second * scale


class OfMapping(Base):
    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return self.line(features["x"])


class OfList(Base):
    def forward(self, parts: list[Tensor]) -> Tensor:
        return self.line(parts[0]) + parts[1]


class One(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)


CASES = [
    (Two, X, "that it can be called with: forward(first, second, scale=...)"),
    (OfMapping, {"x": X}, "({},), the mapping as its one argument"),
    (One, {"y": X}, "tuple({}.values()), without names"),
    (OfList, (X, X), "({},), all of it as one argument"),
    (One, (X, X), "{}[0], its first member alone"),
]


def test_optimize_names_the_arguments_where_nothing_fits() -> None:
    """tests/compat/test_errors_that_lead_on.py has structures that fit."""
    with pytest.raises(ValueError, match=re.escape(CASES[0][2])):
        oxytorch.optimize(Two().eval(), sample_input=X)


@pytest.mark.parametrize(("kind", "sample", "way"), CASES)
def test_quantize_suggests_the_structure(kind: type[nn.Module], sample: Any, way: str) -> None:
    """A pair of an image and a label is the usual case."""
    found = re.escape(way.format("calibration_data[0]"))
    with pytest.raises(ValueError, match=rf"^quantize: calibration_data\[0\] does not .*{found}"):
        oxytorch.quantize(kind().eval(), [sample])


def test_prepare_suggests_the_structure() -> None:
    with pytest.raises(ValueError, match=r"^prepare: example_inputs does not fit .*inputs\[0\]"):
        prepare(One().eval(), None, (X, X))
