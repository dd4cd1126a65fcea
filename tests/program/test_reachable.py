"""The Python state that a module's code can read is found, and changes of it are seen."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import random
import sys
import time
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from oxytorch.graph.code import CodeWatch
from oxytorch.graph.errors import CaptureError
from oxytorch.graph.recording import recorded
from oxytorch.program.codes import Codes
from oxytorch.program.reachable import Reachable

NUMBER = 1.0
TABLE = {"scale": 1.0, "inner": {"flag": False}}
NAMES = {"a", "b"}
VARIABLE: ContextVar[float] = ContextVar("VARIABLE", default=1.0)


@dataclass
class Settings:
    scale: float = 1.0


class Doubled(Settings):
    pass


class Late:
    late = 2.0


class Meta(type):
    pass


class Mode(metaclass=Meta):
    pass


def _rename(kind: type) -> None:
    kind.__name__ = "Renamed"


settings_file = types.ModuleType("settings_file")
settings_file.scale = 1.0  # type: ignore[attr-defined]
sys.modules["reachable_settings"] = settings_file


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


def scaled(x: Tensor, factors: list[float] = [1.0]) -> Tensor:  # noqa: B006
    return x * factors[0]


def with_closure() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    scale = 1.0

    def apply(x: Tensor) -> Tensor:
        return x * scale

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return apply, change


def with_empty_variable() -> tuple[Callable[[], bool], Callable[[float], None]]:
    if not NAMES:
        scale = 1.0

    def is_filled() -> bool:
        try:
            return scale > 0
        except NameError:
            return False

    def fill(value: float) -> None:
        nonlocal scale
        scale = value

    return is_filled, fill


def _imported_inside() -> Any:
    import reachable_settings

    return reachable_settings.scale


def _imported_from() -> Any:
    from reachable_settings import scale

    return scale


def _imported_if_there() -> float:
    try:
        import reachable_plugin
    except ImportError:
        return 1.0
    return float(reachable_plugin.scale)


def _may_import(m: Any) -> float:
    if m.settings.scale == 1.0:
        return 1.0
    import reachable_plugin

    return float(reachable_plugin.scale)


def _late() -> bool:
    try:
        return late > 0  # type: ignore[name-defined, no-any-return]
    except NameError:
        return False


class Base(nn.Module):
    KIND = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.settings_by_name = {"first": 1.0, "second": 2.0}
        self.in_order = OrderedDict(first=1.0, second=2.0)
        self.numbers = {0, 8}
        self.settings, self.slots = Settings(), Slots()
        self.items, self.nested = [1.0, 2.0], [{"scale": [1.0]}]
        self.ordered = OrderedDict(scale=1.0)
        self.apply_, self.change_ = with_closure()
        self.partial = functools.partial(scaled, factors=[1.0])
        self.constant = torch.ones(4)
        self.word = "relu"
        self.weak = weakref.ref(self.settings)
        self.mode = Mode()
        self.empty = object.__new__(Slots)
        self.is_filled, self.fill = with_empty_variable()

    @property
    def hidden(self) -> float:
        return self.settings.scale


def _module(read: Callable[[Any, Tensor], Any]) -> nn.Module:
    kind = type("Reading", (Base,), {"forward": lambda self, x: read(self, self.layer(x))})
    made: nn.Module = kind().eval()
    return made


def _looked_at(module: nn.Module) -> Reachable:
    codes = Codes()
    with torch.no_grad(), codes.watching():
        module(torch.ones(2, 4))
    if codes.refusal is not None:
        raise CaptureError(codes.refusal)
    return Reachable(module, codes)


def _set(target: Any, key: Any, value: Any) -> None:
    if isinstance(target, (dict, list)):
        target[key] = value
    else:
        setattr(target, key, value)


CHANGES: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda m, x: getattr(torch, m.word)(x), lambda m: _set(m, "word", "tanh")),
    "dataclass": (lambda m, x: x * m.settings.scale, lambda m: _set(m.settings, "scale", 2.0)),
    "property": (lambda m, x: x * m.hidden, lambda m: _set(m, "settings", Settings(2.0))),
    "slots": (lambda m, x: x * m.slots.scale, lambda m: _set(m.slots, "scale", 2.0)),
    "list": (lambda m, x: x * m.items[0], lambda m: _set(m.items, 0, 2.0)),
    "list_grown": (lambda m, x: x * len(m.items), lambda m: m.items.append(3.0)),
    "nested": (lambda m, x: x * m.nested[0]["scale"][0], lambda m: _set(m.nested[0], "scale", [2])),
    "ordered": (lambda m, x: x * m.ordered["scale"], lambda m: _set(m.ordered, "scale", 2.0)),
    "closure": (lambda m, x: m.apply_(x), lambda m: m.change_(2.0)),
    "partial": (lambda m, x: m.partial(x), lambda m: m.partial.keywords["factors"].append(1.0)),
    "default": (lambda m, x: scaled(x), lambda m: _set(scaled.__defaults__[0], 0, 2.0)),  # type: ignore[index]
    "global": (lambda m, x: x * NUMBER, lambda m: globals().update(NUMBER=2.0)),
    "table": (lambda m, x: x * TABLE["scale"], lambda m: _set(TABLE["inner"], "flag", True)),
    "set": (lambda m, x: x * ("a" in NAMES), lambda m: (NAMES.remove("a"), NAMES.add("c"))),
    "order_of_a_dictionary": (
        lambda m, x: x * (next(iter(m.settings_by_name)) == "first"),
        lambda m: _set(m.settings_by_name, "first", m.settings_by_name.pop("first")),
    ),
    "order_of_an_ordered_dictionary": (
        lambda m, x: x * (next(iter(m.in_order)) == "first"),
        lambda m: m.in_order.move_to_end("first"),
    ),
    "order_of_a_set": (
        lambda m, x: x * next(iter(m.numbers)),
        lambda m: (m.numbers.clear(), m.numbers.update([8]), m.numbers.update([0])),
    ),
    "order_of_layers": (
        lambda m, x: next(m.children())(x),
        lambda m: _set(m._modules, "layer", m._modules.pop("layer")),
    ),
    "order_of_parameters": (
        lambda m, x: x * next(m.layer.parameters()).dim(),
        lambda m: _set(m.layer._parameters, "weight", m.layer._parameters.pop("weight")),
    ),
    "class": (lambda m, x: x * m.KIND, lambda m: _set(type(m), "KIND", 2.0)),
    "class_by_name": (lambda m, x: x * getattr(m, "KI" + "ND"), lambda m: _set(m, "KIND", 2.0)),
    "over_the_class": (lambda m, x: x * m.KIND, lambda m: _set(m, "KIND", 2.0)),
    "forward": (lambda m, x: x, lambda m: _set(type(m), "forward", lambda self, x: -x)),
    "forward_of_a_layer": (lambda m, x: x, lambda m: _set(m.layer, "forward", lambda x: -x)),
    "variable": (lambda m, x: x * VARIABLE.get(), lambda m: VARIABLE.set(2.0)),
    "environment": (
        lambda m, x: x * (2 if os.environ.get("REACHABLE") else 1),
        lambda m: os.environ.update(REACHABLE="1"),
    ),
    "constant": (lambda m, x: x * m.constant, lambda m: m.constant.data.mul_(2)),
    "weight": (lambda m, x: x, lambda m: m.layer.weight.data.mul_(2)),
    "mode": (lambda m, x: x, lambda m: m.layer.train()),
    "hook": (lambda m, x: x, lambda m: m.layer.register_forward_hook(lambda *call: None)),
    "layer": (lambda m, x: x, lambda m: _set(m, "layer", nn.Linear(4, 4))),
    "function_of_torch": (
        lambda m, x: nn.functional.relu(x),
        lambda m: _set(nn.functional, "relu", torch.tanh),
    ),
    "held_weakly": (lambda m, x: x * m.weak().scale, lambda m: _set(m.settings, "scale", 2.0)),
    "asks_for_gradients": (
        lambda m, x: x * m.layer.weight.requires_grad,
        lambda m: m.requires_grad_(False),
    ),
    "gradient": (
        lambda m, x: x * (m.layer.weight.grad is None),
        lambda m: _set(m.layer.weight, "grad", torch.ones(4, 4)),
    ),
    "bases": (
        lambda m, x: x * getattr(m.settings, "late", 1.0),
        lambda m: _set(type(m), "__bases__", (Late, *type(m).__bases__)),
    ),
    "name_of_a_class": (lambda m, x: x * len(type(m).__name__), lambda m: _rename(type(m))),
    "class_of_an_object": (
        lambda m, x: x * m.settings.scale,
        lambda m: _set(m.settings, "__class__", Doubled),
    ),
    "imported_inside": (
        lambda m, x: x * _imported_inside(),
        lambda m: _set(settings_file, "scale", 2.0),
    ),
    "imported_from": (
        lambda m, x: x * _imported_from(),
        lambda m: _set(settings_file, "scale", 2.0),
    ),
    "not_imported": (
        lambda m, x: x * _may_import(m),
        lambda m: _set(sys.modules, "reachable_plugin", settings_file),
    ),
    "imported_module": (
        lambda m, x: x * _imported_inside(),
        lambda m: _set(sys.modules, "reachable_settings", types.ModuleType("other")),
    ),
}

ABSENT: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Any]]] = {
    "default": (lambda m, x: x * getattr(m, "late", 1.0), lambda m: _set(m, "late", 2.0)),
    "asked_for": (lambda m, x: x * hasattr(m, "late"), lambda m: _set(m, "late", 2.0)),
    "key": (lambda m, x: x * ("late" in m.__dict__), lambda m: _set(m, "late", 2.0)),
    "listed": (lambda m, x: x * len(vars(m)), lambda m: _set(m, "late", 2.0)),
    "name_made": (lambda m, x: x * hasattr(m, "la" + "te"), lambda m: _set(m, "late", 2.0)),
    "child": (lambda m, x: x * hasattr(m.layer, "late"), lambda m: _set(m.layer, "late", 2.0)),
    "new_child": (lambda m, x: x * hasattr(m, "late"), lambda m: _set(m, "late", nn.ReLU())),
    "class": (lambda m, x: x * hasattr(m, "late"), lambda m: _set(type(m), "late", 2.0)),
    "base_class": (lambda m, x: x * hasattr(m, "late"), lambda m: _set(Base, "late", 2.0)),
    "class_of_torch": (
        lambda m, x: x * hasattr(m.layer, "late"),
        lambda m: _set(nn.Linear, "late", 2.0),
    ),
    "object": (
        lambda m, x: x * hasattr(m.settings, "late"),
        lambda m: _set(m.settings, "late", 2.0),
    ),
    "class_of_an_object": (
        lambda m, x: x * hasattr(m.settings, "late"),
        lambda m: _set(Settings, "late", 2.0),
    ),
    "function": (lambda m, x: x * hasattr(scaled, "late"), lambda m: _set(scaled, "late", 2.0)),
    "weight": (
        lambda m, x: x * hasattr(m.layer.weight, "late"),
        lambda m: _set(m.layer.weight, "late", 2.0),
    ),
    "dictionary": (lambda m, x: x * ("late" in TABLE), lambda m: _set(TABLE, "late", 2.0)),
    "global_by_name": (lambda m, x: x * _late(), lambda m: globals().update(late=2.0)),
    "module": (
        lambda m, x: x * hasattr(settings_file, "late"),
        lambda m: _set(settings_file, "late", 2.0),
    ),
    "class_of_a_class": (
        lambda m, x: x * hasattr(type(m.mode), "late"),
        lambda m: _set(Meta, "late", 2.0),
    ),
    "slot": (lambda m, x: x * hasattr(m.empty, "scale"), lambda m: _set(m.empty, "scale", 2.0)),
    "variable": (lambda m, x: x * m.is_filled(), lambda m: m.fill(2.0)),
}
"""What code asks for that is not there, and the change that puts it there."""


@pytest.fixture(autouse=True)
def _everything_back() -> Any:
    relu = nn.functional.relu
    yield
    nn.functional.relu = relu
    globals().update(NUMBER=1.0)
    TABLE.update(scale=1.0, inner={"flag": False})
    NAMES.clear()
    NAMES.update("ab")
    VARIABLE.set(1.0)
    os.environ.pop("REACHABLE", None)
    scaled.__defaults__[0][:] = [1.0]  # type: ignore[index]
    sys.modules["reachable_settings"] = settings_file
    sys.modules.pop("reachable_plugin", None)
    settings_file.scale = 1.0  # type: ignore[attr-defined]
    for owner in (Base, nn.Linear, Settings, Meta, scaled, settings_file):
        vars(owner).get("late") and delattr(owner, "late")
    TABLE.pop("late", None)
    globals().pop("late", None)


@pytest.fixture(params=["library", "python"])
def comparison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are compared by the library, or, where it does not know this torch, in Python."""
    if request.param == "python":
        monkeypatch.setattr("oxytorch.core.sources.functions_in_known_torch", lambda: None)


@pytest.mark.usefixtures("comparison")
@pytest.mark.parametrize("name", [*CHANGES, *(f"absent_{name}" for name in ABSENT)])
def test_changes_are_seen(name: str) -> None:
    read, change = CHANGES.get(name) or ABSENT[name.removeprefix("absent_")]
    module = _module(read)
    state = _looked_at(module)
    assert state.is_current()
    with torch.no_grad():
        module(torch.ones(2, 4))
    assert state.is_current(), "a call changes nothing"
    change(module)
    assert not state.is_current()


@pytest.mark.usefixtures("comparison")
def test_what_is_as_it_was_is_current() -> None:
    module = _module(lambda m, x: x * m.settings.scale)
    state = _looked_at(module)
    for _ in range(2):
        module.word = "tanh"
        assert not state.is_current()
        module.word = "relu"
        module.added = 1
        del module.added
        assert state.is_current()


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "strides": Tensor.t,
    "shape": lambda values: values[:2],
    "dimensions": lambda values: values.reshape(2, -1, 4),
    "dtype": Tensor.double,
}


@pytest.mark.usefixtures("comparison")
@pytest.mark.parametrize("size", [4, 8192])
@pytest.mark.parametrize("name", FORMS)
def test_values_may_be_left_to_others_and_forms_not(name: str, size: int) -> None:
    module = _module(lambda m, x: x)
    with torch.no_grad():
        module.layer.weight = nn.Parameter(torch.ones(size, 4))
        module.layer.weight.data = torch.ones(4, size).t() if size > 4 else torch.ones(4, 4)
    module.layer.bias = None
    state = _looked_at(module)
    free = state.without_values()
    module.layer.weight.data.mul_(2)
    module.layer.weight.data = torch.zeros_like(module.layer.weight)
    assert not state.is_current()
    assert free.is_current()
    module.layer.weight.data = FORMS[name](module.layer.weight.data)
    assert not free.is_current()


@pytest.mark.parametrize(
    ("read", "change"), [("globals()['NUMBER']", "NUMBER"), ("('late' in globals())", "late")]
)
def test_all_global_variables_are_looked_at_where_the_code_asks_for_them(
    read: str, change: str
) -> None:
    table = {"NUMBER": 1.0, "__name__": "elsewhere", "__builtins__": __builtins__}
    code = f"def forward(self, x):\n    return self.layer(x) * {read}\n"
    exec(code, table)
    module = _module(lambda m, x: x)
    type(module).forward = table["forward"]  # type: ignore[method-assign, assignment]
    state = _looked_at(module)
    assert state.is_current()
    table[change] = 2.0
    assert not state.is_current()


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "print": (lambda m, x: print("called") or x, "print"),
    "time": (lambda m, x: x * (1 if time.time() else 2), "time"),
    "random": (lambda m, x: x * random.random(), "random"),
    "file": (lambda m, x: x * (1 if os.path.exists("a") else 2), "exists"),
    "array": (lambda m, x: x * float(m.array[0]), "ndarray"),
    "missing_module": (lambda m, x: x * _imported_if_there(), "import reachable_plugin"),
    "module_by_name": (
        lambda m, x: x * importlib.import_module("reachable_settings").scale,
        "import_module",
    ),
}


@pytest.mark.parametrize("name", [*REFUSED])
def test_what_cannot_be_compared_is_refused(name: str) -> None:
    read, reason = REFUSED[name]
    module = _module(read)
    if name == "array":
        module.array = np.ones(3)
    with pytest.raises(CaptureError, match=reason):
        _looked_at(module)


def test_too_many_places_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from oxytorch.program import reachable

    monkeypatch.setattr(reachable, "_MOST", 50)
    with pytest.raises(CaptureError, match="too many"):
        _looked_at(_module(lambda m, x: x))


class Cycle:
    """Garbage that only the collector finds, and whose end runs code of Python's library."""

    def __init__(self, table: weakref.WeakKeyDictionary[Any, int]) -> None:
        self.itself = self
        table[self] = 1


@pytest.mark.parametrize("watch", ["program", "region", "formula"])
def test_what_the_garbage_collector_runs_belongs_to_no_module(watch: str) -> None:
    class Busy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            made = [[] for _ in range(3000)]  # enough to set off a collection
            return self.layer(x) + len(made)

    table: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
    model, x, refusals = Busy(), torch.ones(1, 2), [""]
    gc.collect()
    before = gc.get_threshold()
    gc.disable()
    for _ in range(30):
        Cycle(table)
    gc.set_threshold(2500, 1, 1)
    gc.enable()
    try:
        if watch == "program":
            codes = Codes()
            with codes.watching():
                model(x)
            refusals = [codes.refusal]
        elif watch == "region":
            run, _ = recorded(model, lambda m: type(m) is nn.Linear, (x,), {})
            refusals = [call.refusal for call in run.calls]
        else:
            found = []
            code = CodeWatch(found.append, lambda *_: None, lambda: model)
            with code.watching():
                model(x)
            refusals = found
    finally:
        gc.set_threshold(*before)
    assert not any("weakref" in str(reason) for reason in refusals)
    assert gc.isenabled()
    gc.collect()
    assert not table
