"""What is noticed between two steps: tensors that moved, states that were replaced."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oxytorch import _library
from oxytorch.optim.gpu import address_guard
from oxytorch.optim.gpu.address_guard import Moved, Watched
from oxytorch.optim.state_table import ParameterState, StateTable

KINDS = [
    pytest.param(
        address_guard.NativeGuard,
        marks=pytest.mark.skipif(
            address_guard._functions() is None,
            reason=_library.why_missing or "this torch is newer than those that were looked at",
        ),
        id="library",
    ),
    pytest.param(address_guard.PythonGuard, id="python"),
]


def parameters() -> list[Tensor]:
    made: list[Tensor] = [nn.Parameter(torch.randn(4, 4)) for _ in range(5)]
    for parameter in made[:4]:
        parameter.grad = torch.randn(4, 4)
    return made


def _give_gradient(own: list[Tensor], state: Tensor) -> None:
    own[4].grad = torch.zeros(4, 4)


def _take_gradient(own: list[Tensor], state: Tensor) -> None:
    own[1].grad = None


def _turn_gradient(own: list[Tensor], state: Tensor) -> None:
    own[1].grad.t_()


def _make_sparse(own: list[Tensor], state: Tensor) -> None:
    own[1].grad = own[1].grad.to_sparse()


def _move_parameter(own: list[Tensor], state: Tensor) -> None:
    own[2].data = own[2].data.clone()


def _move_state(own: list[Tensor], state: Tensor) -> None:
    state.set_(torch.zeros(7))


def _cut_parameter(own: list[Tensor], state: Tensor) -> None:
    own[3].data = own[3].data[:2]


def _negate_gradient(own: list[Tensor], state: Tensor) -> None:
    own[1].grad = torch._neg_view(torch.ones(4, 4))


def _empty_gradient(own: list[Tensor], state: Tensor) -> None:
    own[1].grad = torch._efficientzerotensor((4, 4))


@pytest.mark.parametrize(
    "event",
    [
        _negate_gradient,
        _empty_gradient,
        _give_gradient,
        _take_gradient,
        _turn_gradient,
        _make_sparse,
        _move_parameter,
        _move_state,
        _cut_parameter,
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_changes_is_noticed(
    kind: Any, event: Callable[[list[Tensor], Tensor], None]
) -> None:
    own, state = parameters(), torch.zeros(7)
    addresses = torch.zeros(4, 3, dtype=torch.int64)
    watch = kind(Watched([*own, state], own, addresses))
    assert watch.compare() is Moved.GRADIENTS
    assert addresses[:, 0].tolist() == [p.grad.data_ptr() for p in own[:4]]
    assert watch.compare() is Moved.NOTHING
    own[0].grad = own[0].grad.clone()
    assert watch.compare() is Moved.GRADIENTS
    assert addresses[0, 0] == own[0].grad.data_ptr() and addresses[0, 1] == 0
    event(own, state)
    assert watch.compare() is Moved.OTHER


@pytest.mark.parametrize("kind", KINDS)
def test_versions_of_what_has_a_gradient_are_counted(kind: Any) -> None:
    own = parameters()
    before = [p._version for p in own]
    kind(Watched(own, own, torch.zeros(4, 1, dtype=torch.int64))).bump_versions()
    assert [p._version - old for p, old in zip(own, before, strict=True)] == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_not_kept_and_parameters_are_given_up(kind: Any) -> None:
    own = parameters()
    watch = kind(Watched(own, own, torch.zeros(4, 1, dtype=torch.int64)))
    gradient, parameter = weakref.ref(own[0].grad), weakref.ref(own[0])
    own[0].grad = None
    gc.collect()
    assert gradient() is None
    del watch, own
    gc.collect()
    assert parameter() is None


def test_a_torch_that_nobody_looked_at_is_asked_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = (_library.NEWEST_TORCH[0], _library.NEWEST_TORCH[1] + 1)
    monkeypatch.setattr(_library, "torch_version", lambda: newer)
    caches = (_library.functions_in_known_torch, address_guard._functions)
    for cached in caches:
        cached.cache_clear()
    own = parameters()
    watch = address_guard.guard(own, own, torch.zeros(4, 1, dtype=torch.int64))
    for cached in caches:
        cached.cache_clear()
    assert isinstance(watch, address_guard.PythonGuard)


CHANGES: list[Callable[[StateTable, Tensor], object]] = [
    lambda table, key: table[key].__setitem__("a", 2),
    lambda table, key: table[key].update(a=2),
    lambda table, key: table[key].pop("a"),
    lambda table, key: table[key].setdefault("new", 2),
    lambda table, key: table[key].__delitem__("a"),
    lambda table, key: table[key].__ior__({"a": 2}),
    lambda table, key: table[key].popitem(),
    lambda table, key: table[key].clear(),
    lambda table, key: table.__setitem__(key, ParameterState(a=2)),
    lambda table, key: table.pop(key),
    lambda table, key: table.__delitem__(key),
    lambda table, key: table.popitem(),
    lambda table, key: table.update({key: ParameterState()}),
    lambda table, key: table.clear(),
    lambda table, key: table[torch.zeros(1)],
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_states_is_counted(change: Callable[[StateTable, Tensor], object]) -> None:
    key = torch.zeros(3)
    for original in [StateTable(entries={key: {"a": 1, "b": 2}})]:
        for table in (original, copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
            assert table.is_counted
            before = table.changes.count
            change(table, next(iter(table)))
            assert table.changes.count > before and table.is_counted


def test_reading_states_counts_nothing() -> None:
    key = torch.zeros(3)
    table = StateTable(entries={key: {"a": 1}})
    before = table.changes.count
    assert table[key]["a"] == 1 and table[key].get("b") is None
    assert table[key].pop("b", None) is None
    assert table[key].setdefault("a", 5) == 1
    assert table.changes.count == before


def test_entries_whose_changes_nobody_counts_are_told() -> None:
    key = torch.zeros(3)
    one, other, third = (StateTable() for _ in range(3))
    one[key] = {"a": 1}
    other[key]["a"] = 1
    third[key] = other[key]
    assert not one.is_counted and other.is_counted and not third.is_counted
