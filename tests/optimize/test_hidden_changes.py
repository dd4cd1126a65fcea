"""What callables and classes keep without showing it: changes of it are followed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch

_factor = 2.0


def _read() -> float:
    return _factor


@functools.cache
def _cached() -> float:
    return _read()


_doubled = functools.partial(torch.mul, other=2.0)


_TEXT = "{0.number}"


class Settings:
    number = 1

    @functools.cached_property
    def twice(self) -> int:
        return self.number * 2


@functools.singledispatch
def _by_kind(settings: Any) -> float:
    return 2.0


class OtherLinear(nn.Linear):
    """Another class of the same formula."""


class Layers(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.keywords = functools.partial(torch.mul, other=2.0)
        self.gelu = functools.partial(nn.functional.gelu, approximate="tanh")
        self.held = functools.partial(_scaled, by=[2.0])
        self.nested = functools.partial(functools.partial(torch.mul, other=2.0))
        self.settings = Settings()
        self.number = 1
        self.body = body

    @functools.cached_property
    def thrice(self) -> int:
        return self.number * 3

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.relu(self.first(self.body(self, x))) + x)


def _by_class(m: Any, x: Tensor) -> Tensor:
    return m.second(x) + x if type(m.second) is nn.Linear else m.second(x) - x


def _scaled(x: Tensor, by: list[float]) -> Tensor:
    return x * by[0]


def _set_factor(value: float) -> None:
    global _factor
    _factor = value
    _cached.cache_clear()


def _clear(m: Any) -> None:
    m.number = 5
    del m.thrice


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], None]]] = {
    "partial": (lambda m, x: m.keywords(x), lambda m: m.keywords.keywords.update(other=5.0)),
    "partial_of_partial": (
        lambda m, x: m.nested(x),
        lambda m: m.nested.keywords.update(other=5.0),
    ),
    "partial_with_fewer_keywords": (
        lambda m, x: m.gelu(x) * 9,
        lambda m: m.gelu.keywords.clear(),
    ),
    "partial_of_a_list": (
        lambda m, x: m.held(x),
        lambda m: m.held.keywords["by"].__setitem__(0, 5.0),
    ),
    "global_partial": (lambda m, x: _doubled(x), lambda m: _doubled.keywords.update(other=5.0)),
    "class": (_by_class, lambda m: setattr(m.second, "__class__", OtherLinear)),
    "cached": (lambda m, x: x * _cached(), lambda m: _set_factor(7.0)),
    "cached_property": (lambda m, x: x * m.thrice, lambda m: setattr(m, "number", 5)),
    "cached_property_deleted": (lambda m, x: x * m.thrice, _clear),
    "cached_property_of_settings": (
        lambda m, x: x * m.settings.twice,
        lambda m: setattr(m.settings, "number", 5),
    ),
    "format": (
        lambda m, x: x * float(_TEXT.format(m.settings)),
        lambda m: setattr(m.settings, "number", 5),
    ),
    "dispatch": (
        lambda m, x: x * _by_kind(m.settings),
        lambda m: _by_kind.register(Settings, lambda settings: 5.0),
    ),
}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_changes_of_what_is_hidden_are_followed(name: str, graph: bool) -> None:
    body, change = CASES[name]
    x = torch.randn(4, 16)
    _set_factor(2.0)
    _by_kind.register(Settings, lambda settings: 2.0)
    model = Layers(body).eval()
    optimized = oxytorch.optimize(model, sample_input=x, graph=graph)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(optimized(x), model(x))
        change(optimized)
        if name not in ("cached", "global_partial", "dispatch"):
            change(model)
        for _ in range(3):
            torch.testing.assert_close(optimized(x), model(x))
    _set_factor(2.0)
    _doubled.keywords.update(other=2.0)


class Fixed(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(16, 16), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x))


@pytest.mark.parametrize(
    ("act", "step"),
    [
        (functools.partial(torch.relu), "linear + relu"),
        (functools.partial(nn.functional.gelu, approximate="tanh"), "linear + gelu"),
    ],
    ids=["relu", "gelu_tanh"],
)
def test_arguments_of_a_partial_that_are_constants_are_no_reason(
    act: Callable[[Tensor], Tensor], step: str
) -> None:
    optimized = oxytorch.optimize(Fixed(act).eval(), sample_input=torch.randn(4, 16))
    report = str(oxytorch.explain(optimized))
    assert step in report


def test_keywords_of_a_copy_are_compared() -> None:
    x = torch.randn(4, 16)
    act = functools.partial(nn.functional.leaky_relu, negative_slope=0.5)
    optimized = oxytorch.optimize(Fixed(act).eval(), sample_input=x)
    other = copy.deepcopy(optimized)
    other.act.keywords.update(negative_slope=0.1)
    with torch.no_grad():
        for model, slope in ((other, 0.1), (optimized, 0.5)):
            hidden = nn.functional.linear(x, model.layer.weight, model.layer.bias)
            torch.testing.assert_close(model(x), nn.functional.leaky_relu(hidden, slope))
