"""State that the code of a model reads through other objects, and what may change beside it."""

import collections
import operator
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import oxytorch

settings = types.ModuleType("settings_of_test_objects")
settings.TABLE, settings.LIST = {"k": 1.0}, [1.0]  # type: ignore[attr-defined]


class Held:
    """An object whose methods read what it keeps."""

    CLASS_LEVEL = 1.0

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def get(self) -> float:
        return self.value

    def of_class(self) -> float:
        return self.CLASS_LEVEL

    def __getitem__(self, key: Any) -> float:
        return self.value

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.value

    def __len__(self) -> int:
        return int(self.value)

    def __iter__(self) -> Any:
        return iter([self.value])

    def __bool__(self) -> bool:
        return self.value > 1

    def __float__(self) -> float:
        return float(self.value)

    def __rmul__(self, other: Tensor) -> Tensor:
        return other * self.value

    def __contains__(self, key: Any) -> bool:
        return self.value == key

    def __neg__(its) -> float:
        return -its.value

    def __str__(its) -> str:
        return str(its.value)


class WithEps(Held):
    """Keeps what has a name that modules have too."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1.0

    def get(self) -> float:
        return self.eps


class OfClass:
    """Has no attributes of its own."""

    value = 1.0

    def get(self) -> float:
        return self.value


outside, by_name, by_method = (
    Held(),
    operator.attrgetter("held.value"),
    operator.methodcaller("get"),
)
of_thread = threading.local()
of_thread.value = 1.0


def with_default(values: list[float] = [1.0]) -> float:  # noqa: B006
    return values[0]


class Model(nn.Module):
    def __init__(self, scaled: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.held, self.eps = Held(), 1.0
        self.inner = types.SimpleNamespace(held=WithEps())
        self.user_dict, self.user_list = collections.UserDict(k=1.0), collections.UserList([1.0])
        self.chain = collections.ChainMap({"k": 1.0})
        self.weak = weakref.ref(self.held)
        self.of_class, self.by_key = OfClass(), {Held(): 1.0}
        self.bound, self.called = self.held.get, self.held.__call__
        self.table, self.items = {"k": 1.0}, [1.0]
        self.table_get, self.items_count = self.table.get, self.items.count
        self.scaled = scaled

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self, self.second(F.gelu(self.first(x))))

    def through(its, h: Tensor) -> Tensor:
        return h * len(its.held) * float(its.held)

    def change(self) -> None:
        self.held.value = self.inner.held.eps = outside.value = 3.0
        self.user_dict["k"] = self.user_list[0] = self.chain["k"] = self.table["k"] = 3.0
        self.items.append(1.0)
        Held.CLASS_LEVEL = OfClass.value = of_thread.value = 3.0
        next(iter(self.by_key)).value = with_default.__defaults__[0][0] = 3.0  # type: ignore[index]
        settings.TABLE["k"] = settings.LIST[0] = 3.0


READS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "method": lambda own, h: h * own.held.get(),
    "class": lambda own, h: h * own.held.of_class(),
    "item": lambda own, h: h * own.held["k"],
    "call": lambda own, h: own.held(h),
    "length": lambda own, h: h * len(own.held),
    "iteration": lambda own, h: h * sum(own.held),
    "truth": lambda own, h: h * (2 if own.held else 1),
    "number": lambda own, h: h * float(own.held),
    "operator": lambda own, h: h * own.held,
    "membership": lambda own, h: h * (2 if 3.0 in own.held else 1),
    "object of an object": lambda own, h: h * own.inner.held.get(),
    "UserDict": lambda own, h: h * own.user_dict["k"],
    "UserList": lambda own, h: h * own.user_list[0],
    "ChainMap": lambda own, h: h * own.chain["k"],
    "weak reference": lambda own, h: h * own.weak().get(),
    "bound method": lambda own, h: h * own.bound(),
    "bound call": lambda own, h: own.called(h),
    "method of a dictionary": lambda own, h: h * own.table_get("k"),
    "method of a list": lambda own, h: h * own.items_count(1.0),
    "table of an imported module": lambda own, h: h * settings.TABLE["k"],
    "list of an imported module": lambda own, h: h * settings.LIST[0],
    "object outside": lambda own, h: h * outside.get(),
    "negation": lambda own, h: h * -own.held,
    "text": lambda own, h: h * float(str(own.held)),
    "method of a method": lambda own, h: own.through(h),
    "class of an object": lambda own, h: h * own.of_class.get(),
    "attrgetter": lambda own, h: h * by_name(own),
    "methodcaller": lambda own, h: h * by_method(own.held),
    "default of a function": lambda own, h: h * with_default(),
    "local of a thread": lambda own, h: h * of_thread.value,
    "key of a dictionary": lambda own, h: h * next(iter(own.by_key)).value,
}


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    yield
    outside.value = Held.CLASS_LEVEL = OfClass.value = of_thread.value = 1.0
    with_default.__defaults__[0][0] = 1.0  # type: ignore[index]
    settings.TABLE["k"] = settings.LIST[0] = 1.0


class _Read(Model):
    """A model whose own method reads, as users write it."""

    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(read)


@pytest.mark.parametrize("graph", [False, True], ids=["regions", "graph"])
@pytest.mark.parametrize("read", READS)
def test_objects(read: str, graph: bool) -> None:
    """What objects keep is followed, whatever way the code reads it."""
    # As a method of a class of its own, so that the code is the module's.
    function = READS[read]
    kind = type("Reads", (Model,), {"scaled": None, "forward": _forward_with(function)})
    x = torch.randn(8, 64)
    model = kind(function).eval()
    optimized = oxytorch.optimize(model, sample_input=x, graph=graph, inplace=False)
    with torch.no_grad():
        optimized(x)
        for one in (model, optimized):
            one.change()
        torch.testing.assert_close(optimized(x), model(x))


def _forward_with(function: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return function(self, self.second(F.gelu(self.first(x))))

    return forward


class Signed(float):
    """A number with an attribute."""

    factor: float


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.number = Signed(1.0)
        self.number.factor = 1.0

    def forward(self, x: Tensor, k: Any = 0.0) -> Tensor:
        k = k["k"] if isinstance(k, dict) else k
        return self.linear(x) * self.number.factor / (x.new_ones(()) * k)


@pytest.mark.parametrize("graph", [False, True], ids=["regions", "graph"])
def test_numbers_with_attributes(graph: bool) -> None:
    """A number of a class of its own may carry what changes."""
    x, model = torch.randn(8, 64), Adds().eval()
    optimized = oxytorch.optimize(model, sample_input=(x, 2.0), graph=graph, inplace=False)
    with torch.no_grad():
        optimized(x, 2.0)
        for one in (model, optimized):
            one.number.factor = 3.0
        torch.testing.assert_close(optimized(x, 2.0), model(x, 2.0))


@pytest.mark.parametrize("wrapped", [lambda k: k, lambda k: {"k": k}])
def test_negative_zero(wrapped: Callable[[float], Any]) -> None:
    """0.0 and -0.0 are equal, and not the same."""
    x, model = torch.randn(8, 64), Adds().eval()
    optimized = oxytorch.optimize(model, sample_input=(x, wrapped(0.0)), graph=True, inplace=True)
    plain = Adds().eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        for k in (0.0, -0.0, 0.0):
            torch.testing.assert_close(optimized(x, wrapped(k)), plain(x, wrapped(k)))


class Tags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.linear(x))
        y.tag = "own"  # type: ignore[attr-defined]
        return y


def test_attributes_of_outputs() -> None:
    """What the code sets on the tensor that it returns is there."""
    x = torch.randn(8, 64)
    optimized = oxytorch.optimize(Tags().eval(), sample_input=x, graph=True, inplace=True)
    with torch.no_grad():
        assert [optimized(x).tag for _ in range(3)] == ["own"] * 3
    assert "attributes" in str(oxytorch.explain(optimized))
