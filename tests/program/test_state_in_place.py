"""State that code reads and that is changed in place is followed, or never recorded."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch

X = torch.linspace(-1, 1, 4 * 16).view(4, 16)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)

    def scale(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scale(torch.relu(self.norm(self.first(x)))))


def scaled(x: Tensor, *, by: float = 2.0) -> Tensor:
    return x * by


def times(x: Tensor, by: float) -> Tensor:
    return x * by


def less(x: Tensor, by: float) -> Tensor:
    return x - by


class KeywordOfFunction(Base):
    def scale(self, x: Tensor) -> Tensor:
        return scaled(x)


class KeywordOfMethod(Base):
    def scale(self, x: Tensor, *, by: float = 2.0) -> Tensor:
        return x * by


class Stored:
    def __init__(self) -> None:
        self.value = 2.0

    def __get__(self, owner: Any, kind: type) -> Any:
        return self if owner is None else self.value


class Hidden(Stored):
    """No value without an object."""

    __slots__ = ("value",)

    def __get__(self, owner: Any, kind: type) -> Any:
        if owner is None:
            raise AttributeError
        return self.value


class Described(Base):
    by = Stored()

    def scale(self, x: Tensor) -> Tensor:
        return x * self.by


class HiddenDescribed(Base):
    by = Hidden()

    def scale(self, x: Tensor) -> Tensor:
        return x * self.by


def _kind(table: dict[str, float], *bases: type) -> Any:
    class Kind(*bases, enum.Enum):  # type: ignore[misc]
        A = "a"

        @property
        def by(self) -> float:
            return table[self.value]

    return Kind


TABLES: list[dict[str, float]] = [{"a": 2.0} for _ in range(3)]
KINDS = [_kind(TABLES[0]), _kind(TABLES[1], str)]


class OfEnum(Base):
    number = 0

    def __init__(self) -> None:
        super().__init__()
        self.kind = KINDS[self.number].A

    def scale(self, x: Tensor) -> Tensor:
        return x * self.kind.by


class OfTextEnum(OfEnum):
    number = 1


def _with_property(table: dict[str, float]) -> type[Base]:
    class OfProperty(Base):
        @property
        def by(self) -> float:
            return table["a"]

        def scale(self, x: Tensor) -> Tensor:
            return x * self.by

    return OfProperty


PART = functools.partial(times, by=2.0)


class GlobalPartial(Base):
    def scale(self, x: Tensor) -> Tensor:
        return PART(x)


class OwnPartial(Base):
    def __init__(self) -> None:
        super().__init__()
        self.part = functools.partial(times, by=2.0)

    def scale(self, x: Tensor) -> Tensor:
        return self.part(x)


def _set_keyword(function: Any) -> Callable[[Any], object]:
    return lambda _: function.__kwdefaults__.update(by=7.0)


def _set_own(function: Any) -> Callable[[Any], object]:
    return lambda model: model.part.__setstate__((function, (), {"by": 7.0}, {}))


CASES: dict[str, tuple[type[Base], Callable[[Any], object], Callable[[], object]]] = {
    "keyword of a function": (
        KeywordOfFunction,
        _set_keyword(scaled),
        lambda: scaled.__kwdefaults__.update(by=2.0),
    ),
    "keyword of a method": (
        KeywordOfMethod,
        _set_keyword(KeywordOfMethod.scale),
        lambda: KeywordOfMethod.scale.__kwdefaults__.update(by=2.0),
    ),
    "descriptor": (
        Described,
        lambda _: setattr(vars(Described)["by"], "value", 7.0),
        lambda: setattr(vars(Described)["by"], "value", 2.0),
    ),
    "descriptor without a value of the class": (
        HiddenDescribed,
        lambda _: setattr(vars(HiddenDescribed)["by"], "value", 7.0),
        lambda: setattr(vars(HiddenDescribed)["by"], "value", 2.0),
    ),
    "property of an enum": (
        OfEnum,
        lambda _: TABLES[0].update(a=7.0),
        lambda: TABLES[0].update(a=2.0),
    ),
    "property of an enum of texts": (
        OfTextEnum,
        lambda _: TABLES[1].update(a=7.0),
        lambda: TABLES[1].update(a=2.0),
    ),
    "property of the model": (
        _with_property(TABLES[2]),
        lambda _: TABLES[2].update(a=7.0),
        lambda: TABLES[2].update(a=2.0),
    ),
    "global partial": (
        GlobalPartial,
        lambda _: PART.__setstate__((times, (), {"by": 7.0}, {})),
        lambda: PART.__setstate__((times, (), {"by": 2.0}, {})),
    ),
    "partial of the model": (OwnPartial, _set_own(times), lambda: None),
    "function of a partial": (OwnPartial, _set_own(less), lambda: None),
}

RECORDED = ("keyword of a function", "keyword of a method", "descriptor", "property of an enum")
"""Of these models a program is made, so that it has to follow what is changed."""

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "sample": {"sample_input": X},
    "graph": {"sample_input": X, "graph": True, "passes": ["program"]},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_state_changed_in_place_is_followed(case: str, way: str) -> None:
    kind, change, restore = CASES[case]
    torch.manual_seed(0)
    model = kind().eval()
    with torch.no_grad():
        optimized = oxytorch.optimize(model, **WAYS[way])
        before = [optimized(X) for _ in range(4)][-1]
        torch.testing.assert_close(before, model(X))
        if way == "graph" and case in RECORDED:
            assert "1 x one program for" in str(oxytorch.explain(optimized))
        try:
            change(optimized)
            if optimized is not model:
                change(model)
            expected, found = model(X), optimized(X)
        finally:
            restore()
    assert not torch.allclose(expected, before, atol=1e-2)
    torch.testing.assert_close(found, expected)


class Introspective(Base):
    """Reads a function that it does not call."""

    def other(self, x: Tensor, by: float = 2.0) -> Tensor:
        return x

    def scale(self, x: Tensor) -> Tensor:
        return x * inspect.signature(self.other).parameters["by"].default


class OfDefaults(Introspective):
    def scale(self, x: Tensor) -> Tensor:
        defaults = Introspective.other.__defaults__
        assert defaults is not None
        return x * float(defaults[0])


class OfAttributes(Introspective):
    """Asks a function for an attribute that it does not have."""

    def scale(self, x: Tensor) -> Tensor:
        return x * float(getattr(Introspective.other, "by", 2.0))


@pytest.mark.parametrize("kind", [Introspective, OfDefaults, OfAttributes])
def test_what_is_read_of_functions_that_do_not_run_is_followed(
    kind: type[Base], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    with torch.no_grad():
        optimized = oxytorch.optimize(model, sample_input=X, graph=True, passes=["program"])
        before = [optimized(X) for _ in range(4)][-1]
        monkeypatch.setattr(Introspective.other, "__defaults__", (7.0,))
        monkeypatch.setattr(Introspective.other, "by", 7.0, raising=False)
        expected, found = model(X), optimized(X)
    assert not torch.allclose(expected, before, atol=1e-2)
    torch.testing.assert_close(found, expected)
