"""Inputs of the wrong structure, in calibration too: the error says what the model takes."""

from __future__ import annotations

import re
from collections import OrderedDict, UserDict
from collections.abc import Callable
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


@pytest.mark.parametrize("sample", [X.to("meta"), (X, [X.to("meta")]), {"first": X.to("meta")}])
def test_optimize_needs_values(sample: Any) -> None:
    with pytest.raises(ValueError, match=r"sample_input whose tensors have values.*the CPU"):
        oxytorch.optimize(Two().eval(), sample_input=sample)


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


class Emptying(nn.Module):
    """Takes what it needs out of a container, as models do that are given a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, batch: Any) -> Tensor:
        if isinstance(batch, list):
            return torch.relu(self.layer(batch.pop()))
        return torch.relu(self.layer(batch.get("inner", batch).pop("x")))


EMPTIED: dict[str, Callable[[Tensor], Any]] = {
    "dictionary": lambda x: {"x": x},
    "ordered dictionary": lambda x: OrderedDict(x=x),
    "BatchEncoding and its like": lambda x: UserDict(x=x),
    "list": lambda x: [x],
    "within another": lambda x: {"inner": {"x": x}},
}
WAYS: list[dict[str, Any]] = [
    {}, {"graph": True}, {"tune": True}, {"verify": True}, {"dtype": torch.bfloat16},
    {"passes": ["fuse"]}, {"passes": ["program"]},
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("kind", EMPTIED)
def test_a_call_may_empty_what_it_is_given(kind: str, way: dict[str, Any]) -> None:
    model, x, make = Emptying().eval(), torch.randn(8, 256), EMPTIED[kind]
    sample = make(x)
    optimized = oxytorch.optimize(model, sample_input=(sample,), **way)
    assert sample == make(x)
    for _ in range(3):
        given = make(x)
        found = optimized(given)
        given = given["inner"] if kind == "within another" else given
        assert not given, "the call took nothing out of what it was given"
    tolerance = 2e-2 if "dtype" in way else 1e-5
    torch.testing.assert_close(found.float(), model(make(x)), rtol=tolerance, atol=tolerance)


def test_quantize_refuses_code_that_empties_what_it_is_given() -> None:
    x = torch.randn(8, 256)
    data = [({"x": x},), ({"x": x + 1},)]
    with pytest.raises(ValueError, match=r"^quantize: Emptying cannot be captured: .*dictionary"):
        oxytorch.quantize(Emptying().eval(), data)
    assert data[0][0] == {"x": x}
