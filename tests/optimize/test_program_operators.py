"""Operators and state that a program holds in other words, and what decides in code is followed."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from counting import counts_original
from torch import Tensor, nn

import oxytorch
from oxytorch.program.smaller import smaller_ones


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any], **tables: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function
        self.__dict__.update(tables)
        self.eval()

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def _optimized(model: nn.Module, *sample: Any) -> nn.Module:
    optimized = oxytorch.optimize(model, sample_input=sample, passes=["program"])
    entries = [e for e in oxytorch.explain(optimized).entries if e.pass_name == "program"]
    assert [entry.applied for entry in entries] == [True], entries
    return optimized


def _same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, equal_nan=True)


BOUNDS = [(7, 0, 10), (8, 0, 7), (5, -1.3, 2.7), (100, 0.1, 0.3), (1, -1, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_counts_are_those_of_histc(bounds: tuple[Any, ...], dtype: torch.dtype) -> None:
    bins, low, high = bounds
    edges = torch.linspace(low, high, bins + 1, dtype=dtype)
    near = [edges, edges.nextafter(edges - 1), edges.nextafter(edges + 1)]
    others = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)
    x = torch.cat([*near, others, torch.randn(500, dtype=dtype) * high]).view(1, -1)
    own = smaller_ones()[torch.ops.aten.histc.default]
    finite = x[x.isfinite()]
    _same(own(finite, *bounds), torch.histc(finite, *bounds))
    _same(own(x, *bounds), torch.histc(finite, *bounds))
    assert own(x, bins, 0, 0) is NotImplemented and own(x.int(), *bounds) is NotImplemented


def test_histc_in_programs_of_all_kinds() -> None:
    """As mixtures of experts count the tokens of each expert."""

    def count(m: Any, x: Tensor) -> Tensor:
        experts = m.layer(x).argmax(-1)
        return torch.histc(experts.float(), bins=8, min=0, max=7).cumsum(0) + x.sum()

    model, x = Of(count), torch.randn(30, 8)
    optimized, exported = _optimized(model, x), torch.export.export(model, (x,))
    program = oxytorch.optimize(exported)
    compiled = torch.compile(model, backend="oxytorch", fullgraph=True)
    for _ in range(3):
        x = torch.randn(30, 8)
        for each in (optimized, program, compiled):
            _same(each(x), model(x))


def test_histc_between_bounds_that_values_tell_stays_torchs() -> None:
    model, x = Of(lambda m, x: torch.histc(m.layer(x), bins=4)), torch.randn(3, 8)
    optimized = oxytorch.optimize(model, sample_input=x, passes=["program"])
    assert "histc" in str(oxytorch.explain(optimized))
    _same(optimized(x), model(x))


def test_allclose_decides_as_in_the_models_code() -> None:
    def branch(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return m.layer(x) if torch.allclose(x, y, atol=1e-3, equal_nan=True) else m.layer(y) * 2

    model = Of(branch)
    x = torch.randn(3, 8)
    x[0, 0] = torch.nan
    optimized = _optimized(model, x, x + 1e-5)
    calls = counts_original(optimized)
    _same(optimized(x, x + 2e-5), model(x, x))
    assert not calls
    for y in (x + 1, x + 1e-5, x + 1, x + 1, x + 1e-5):
        _same(optimized(x, y), model(x, y))
    known = len(calls)
    for y in (x + 1, x + 1e-5):
        _same(optimized(x, y), model(x, y))
    assert len(calls) == known


SPLIT: dict[str, Callable[[Any, Tensor], Any]] = {
    "a number": lambda m, x: torch.tensor_split(m.layer(x), 3, -1),
    "a number by name": lambda m, x: torch.tensor_split(dim=-1, input=m.layer(x), sections=3),
    "a method": lambda m, x: m.layer(x).tensor_split(3, dim=-1),
    "a list": lambda m, x: torch.tensor_split(m.layer(x), [2, 5], dim=1),
}


@pytest.mark.parametrize("name", SPLIT)
def test_tensors_are_split_by_numbers(name: str) -> None:
    model, x = Of(lambda m, x: [part * 2 for part in SPLIT[name](m, x)]), torch.randn(3, 8)
    optimized = _optimized(model, x)
    calls = counts_original(optimized)
    for _ in range(2):
        x = torch.randn(3, 8)
        _same(optimized(x), model(x))
    assert not calls


def test_tensors_that_a_tensor_splits_stay_with_the_models_code() -> None:
    def split(m: Any, x: Tensor, at: Tensor) -> Any:
        return [part * 2 for part in torch.tensor_split(m.layer(x), at, 1)]

    model, x = Of(split), torch.randn(3, 8)
    optimized = oxytorch.optimize(model, sample_input=(x, torch.tensor([2, 5])), passes=["program"])
    assert "tensor_split, which reads values" in str(oxytorch.explain(optimized))
    _same(optimized(x, torch.tensor([1, 3])), model(x, torch.tensor([1, 3])))


_VIEWS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "keys": lambda table: table.keys(),
    "values": lambda table: table.values(),
    "items": lambda table: table.items(),
    "a proxy": types.MappingProxyType,
}
_WRITES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another value": lambda table: table.update(b=5.0),
    "another key": lambda table: table.update(c=7.0),
    "one less": lambda table: table.pop("b"),
}


@pytest.mark.parametrize("write", _WRITES)
@pytest.mark.parametrize("view", _VIEWS)
def test_views_of_dictionaries_are_compared(view: str, write: str) -> None:
    table = {"a": 1.0, "b": 2.0}

    def scale(m: Any, x: Tensor) -> Tensor:
        numbers = dict(m.view).values() if view in ("items", "a proxy") else m.view
        found = [n if isinstance(n, float) else float(ord(n)) for n in numbers]
        return m.layer(x) * sum(found)

    model, x = Of(scale, view=_VIEWS[view](table)), torch.randn(3, 8)
    optimized = oxytorch.optimize(model, sample_input=x, passes=["program"], inplace=True)
    entries = [e for e in oxytorch.explain(optimized).entries if e.pass_name == "program"]
    assert [entry.applied for entry in entries] == [True], entries
    expected = _layer_of(model, x) * _sum_of(view, table)
    _same(optimized(x), expected)
    _WRITES[write](table)
    for _ in range(3):
        _same(optimized(x), _layer_of(model, x) * _sum_of(view, table))


def _layer_of(model: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, model.layer.weight, model.layer.bias)


def _sum_of(view: str, table: dict[str, float]) -> float:
    return sum(map(float, map(ord, table) if view == "keys" else table.values()))
