"""Words of memory tell of each change that a full comparison finds, and of nothing else."""

from __future__ import annotations

import ctypes
import random
import sys
import sysconfig
import threading
from abc import ABCMeta
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import nn

from marks import NEEDS_LIBRARY
from oxytorch import _library
from oxytorch.core import sources, words
from oxytorch.core.sources import MISSING, Places
from oxytorch.core.words import Offsets, has_no_attributes, offsets
from oxytorch.program.reachable import _table_of

pytestmark = NEEDS_LIBRARY


@contextmanager
def _without_words() -> Iterator[None]:
    """Every place is compared at every look, as with a Python that has no such words."""

    def use(found: Offsets) -> None:
        _library.functions().oxytorch_set_offsets((ctypes.c_int64 * len(found))(*found))

    words.set_offsets(_library.functions())
    use(Offsets())
    try:
        yield
    finally:
        use(offsets())


class Meta(ABCMeta):
    pass


class Base:
    KIND = 1.0


class Other(Base):
    pass


def scaled(x: float, factor: float = 1.0, *, more: float = 0.0) -> float:
    return x * factor + more


def doubled(x: float) -> float:
    return 2 * x


class World:
    """Objects of all kinds that are looked at, and ways to change them."""

    def __init__(self) -> None:
        content = 1.0

        def closure() -> float:
            return content

        def fill(value: float) -> None:
            nonlocal content
            content = value

        self.fill, self.cell = fill, closure.__closure__[0]  # type: ignore[index]
        self.meta = Meta("MetaOfKind", (Meta,), {})
        self.base = type("BaseOfKind", (Base,), {"method": scaled})
        members = {"static": staticmethod(scaled), "method": doubled, "NUMBER": 1000.5}
        self.kind = self.meta("Kind", (self.base,), members)
        self.owner = self.kind()
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()))
        self.function = type(scaled)(scaled.__code__, globals(), "own", (1.0,))
        self.table: dict[Any, Any] = {"a": 1, "b": 2, 3: "c"}
        self.ordered = OrderedDict(a=1, b=2)
        self.tensor, self.spare = torch.zeros(2, 3), [torch.zeros(2, 3), torch.zeros(3, 2)]

    def places(self) -> Places:
        found = Places()
        for module in self.model.modules():
            found.types.append((module, type(module)))
            found.add_dictionary(module.__dict__)
            for value in module.__dict__.values():
                if isinstance(value, dict):
                    found.add_dictionary(value)
        for table in (self.table, self.ordered, self.owner.__dict__, _table_of(self.kind)):
            found.add_dictionary(table)
        found.entries.append((self.table, "absent", self.table.get("absent", MISSING)))
        if self.table.get("a") is not None:
            found.present.append((self.table, "a"))
        found.types.append((self.owner, self.kind))
        for name in ("static", "method", "NUMBER", "KIND", "__mro__", "__name__", "__init__"):
            if hasattr(self.kind, name):
                found.attributes.append((self.kind, name, getattr(self.kind, name)))
        found.attributes.append((self.base, "KIND", self.base.KIND))  # type: ignore[attr-defined]
        found.attributes.append((self.cell, "cell_contents", self.cell.cell_contents))
        found.add_function(self.function)
        found.add_tensor(self.tensor)
        found.close()
        return found


def _set_class(owner: Any, name: str, values: list[Any]) -> Callable[[random.Random], None]:
    """Sets it to one of the values, or takes it away."""

    def change(choice: random.Random) -> None:
        value = choice.choice([*values, MISSING])
        with suppress(AttributeError):  # where a property of the class's class has the name
            if value is not MISSING:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)

    return change


def _set_item(table: Any, keys: list[Any], values: list[Any]) -> Callable[[random.Random], None]:
    def change(choice: random.Random) -> None:
        key, value = choice.choice(keys), choice.choice([*values, MISSING])
        if value is not MISSING:
            table[key] = value
        else:
            table.pop(key, None)

    return change


def _one_of(*ways: Callable[[], object]) -> Callable[[random.Random], None]:
    return lambda choice: (choice.choice(ways)(), None)[1]


def _move(table: OrderedDict[str, int], key: str) -> None:
    if key in table:
        table.move_to_end(key)


def _changes(world: World) -> list[Callable[[random.Random], None]]:
    w: Any = world
    getter = property(lambda kind: kind.__dict__.get("NUMBER", 0))
    found = [
        _set_item(w.table, ["a", "b", 3, "absent"], [1, 2, None]),
        _set_item(w.ordered, ["a", "b"], [1, 2]),
        _one_of(lambda: _move(w.ordered, "a"), lambda: _move(w.ordered, "b")),
        _one_of(w.table.clear, lambda: w.table.update({"a": 1, "b": 2, 3: "c"})),
        _set_class(w.owner, "late", [1, 2]),
        _one_of(*(lambda k=k: setattr(w.owner, "__class__", k) for k in (w.kind, w.kind))),
        _set_class(w.kind, "NUMBER", [w.kind.NUMBER, 2.0]),
        _set_class(w.kind, "method", [w.kind.method, scaled]),
        _set_class(w.kind, "static", [vars(w.kind)["static"], staticmethod(scaled)]),
        _set_class(w.kind, "KIND", [1.0, Base.KIND]),
        _set_class(w.base, "KIND", [1.0, Base.KIND]),
        _set_class(w.base, "method", [doubled]),
        _set_class(w.meta, "NUMBER", [getter, 1.0]),
        _set_class(w.meta, "__getattribute__", [lambda *given: type.__getattribute__(*given)]),
        _one_of(*(lambda bases=bases: setattr(w.base, "__bases__", bases)
                  for bases in ((Base,), (Other,)))),
        _one_of(*(lambda name=name: setattr(w.kind, "__name__", name)
                  for name in (w.kind.__name__, "Renamed"))),
        _one_of(lambda: w.fill(1.0), lambda: w.fill(2.0),
                lambda first=w.cell.cell_contents: w.fill(first)),
        _one_of(*(lambda code=code: setattr(w.function, "__code__", code)
                  for code in (scaled.__code__, doubled.__code__))),
        _one_of(*(lambda value=value: setattr(w.function, "__defaults__", value)
                  for value in (w.function.__defaults__, None, (2.0,)))),
        _one_of(*(lambda value=value: setattr(w.function, "__kwdefaults__", value)
                  for value in (None, {"more": 1.0}))),
        _one_of(*(lambda value=value: setattr(w.tensor, "data", value)
                  for value in (w.tensor.data, torch.zeros(3, 2), torch.zeros(2, 3).half(),
                                torch.zeros(3, 2).t(), torch.zeros(1, 2, 3)))),
        lambda choice: torch.utils.swap_tensors(w.tensor, choice.choice(w.spare)),
        _one_of(lambda: w.model.train(), lambda: w.model.eval()),
        _one_of(*(lambda layer=layer: w.model.__setitem__(1, layer)
                  for layer in (w.model[1], nn.Identity()))),
    ]  # fmt: skip
    return [*found, *_changes_of_modules(w.model)]


def _changes_of_modules(model: nn.Module) -> list[Callable[[random.Random], None]]:
    found = []
    hooks: list[Any] = []
    for module in model.modules():
        found.append(_set_class(module, "late", [1]))
        found.append(
            _one_of(
                lambda module=module: hooks.append(module.register_forward_hook(print)),
                lambda: [hook.remove() for hook in hooks],
            )
        )
        for name, parameter in [*module._parameters.items()]:
            for value in (parameter, None):
                found.append(
                    _one_of(lambda m=module, n=name, v=value: m._parameters.__setitem__(n, v))
                )
    return found


@pytest.mark.parametrize("seed", range(12))
def test_changes_at_random_are_seen_as_a_full_comparison_sees_them(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = random.Random(seed)
    world = World()
    changes = _changes(world)
    for _ in range(12):
        by_words = world.places()
        with _without_words():
            compared = world.places()
        with monkeypatch.context() as patch:
            patch.setattr(sources, "functions_in_known_torch", lambda: None)
            in_python = world.places()
        assert by_words.are_current() and compared.are_current() and in_python.are_current()
        for _ in range(25):
            for _ in range(choice.choice([1, 1, 2])):
                choice.choice(changes)(choice)
            expected = in_python.are_current()
            assert compared.are_current() is expected
            assert by_words.are_current() is expected
            assert by_words.are_current() is expected  # also of words that were noted again


def test_words_are_found() -> None:
    """Where Python has them, so that nothing is compared without need."""
    found = offsets()
    if sys.version_info >= (3, 14) or sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert found.tag == 0
        return
    assert all(getattr(found, name) > 0 for name in Offsets._fields if name != "values")
    assert (found.values > 0) == (sys.version_info >= (3, 13))


def test_tensors_are_found_in_their_objects() -> None:
    """So that nothing in C++ refers to them, which would keep torch from swapping them."""
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert offsets().tensor > 0


def test_a_swapped_tensor_is_another_though_its_own_is_gone() -> None:
    kept = [nn.Parameter(torch.zeros(3, 3, dtype=torch.float64)) for _ in range(50)]
    found = Places()
    for tensor in kept:
        found.add_tensor(tensor)
    found.close()
    assert found.are_current()
    for tensor in kept:
        torch.utils.swap_tensors(tensor, nn.Parameter(torch.zeros(2)))
    assert not any(found.are_current() for _ in range(20) if [torch.ones(9) for _ in range(100)])


def test_attributes_that_code_sets_often_are_seen() -> None:
    """Python gives code that runs often quicker ways to set attributes."""
    owner = World().owner
    owner.first = 0
    table = vars(owner)

    def assign(value: Any) -> None:
        owner.first = value

    for number in range(300):
        found = Places()
        found.add_dictionary(table)
        found.close()
        assert found.are_current()
        assign(number + 1000)
        assert not found.are_current()


def test_a_dictionary_in_the_place_of_a_freed_one_is_another() -> None:
    for _ in range(200):
        owner: Any = nn.Identity()
        owner.table = {"a": 1}
        found = Places()
        found.add_dictionary(vars(owner))
        found.add_dictionary(owner.table)
        found.close()
        assert found.are_current()
        owner.table = None
        owner.table = {"a": 1}
        assert not found.are_current()


def test_what_the_words_lie_in_lives_as_long_as_they_do() -> None:
    world = World()
    found = world.places()
    world.base.__bases__ = (Other,)  # the order of the classes is a new tuple
    world.kind.__bases__ = (Base,)
    world.kind.static = staticmethod(doubled)
    for _ in range(100):
        [type("Kind", (), {}) for _ in range(10)]
        assert not found.are_current()


def test_changes_are_seen_while_other_threads_look() -> None:
    world = World()
    found = world.places()
    table, kind = world.table, world.kind
    stop = threading.Event()
    failures: list[str] = []

    def look() -> None:
        while not stop.is_set():
            found.are_current()

    threads = [threading.Thread(target=look) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for number in range(300):
            table["a"] = 1000 + number
            if found.are_current():
                failures.append("an entry")
            table["a"] = 1
            kind.method = scaled  # type: ignore[attr-defined]
            if found.are_current():
                failures.append("an attribute of a class")
            kind.method = doubled  # type: ignore[attr-defined]
            if not found.are_current():
                failures.append("what is as it was")
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert not failures


def test_a_function_that_is_asked_for_its_attributes_has_none_yet() -> None:
    def own() -> None: ...

    table: OrderedDict[str, int] = OrderedDict()
    found = Places()
    found.bare = [each for each in (own, table) if has_no_attributes(each)]
    found.close()
    vars(own), vars(table)
    for _ in range(2):
        assert found.are_current()
    own.flag = 1  # type: ignore[attr-defined]
    assert len(found) == 0 or not found.are_current()
