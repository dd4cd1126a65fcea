"""Every change of what a derived value was made from is seen, in C++ and in plain Python."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from oxytorch.core import sources
from oxytorch.core.sources import Sources
from oxytorch.core.tensor_forms import SMALL

LARGE = SMALL // 4 + 1
FACTOR = 2.0


def doubled(x: float) -> float:
    return 2 * x


class Layer(nn.Module):
    """A module with all that sources look at."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(3, 3)
        self.bias = nn.Parameter(torch.zeros(3))
        self.weight = nn.Parameter(torch.zeros(LARGE))
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("missing", None)
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.fixture(params=["library", "python"])
def watch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(sources, "functions_in_known_torch", lambda: None)


def _write_large(layer: Any) -> None:
    with torch.no_grad():
        layer.weight[0] = 1


def _write_unseen(layer: Any) -> None:
    layer.bias.data.numpy()[1] = 1


def _hook(layer: Any) -> None:
    layer.register_forward_hook(lambda *_: None)


CHANGES: dict[str, Callable[[Any], object]] = {
    "attribute": lambda layer: setattr(layer, "eps", 1e-6),
    "training": lambda layer: layer.train(not layer.training),
    "own forward": lambda layer: setattr(layer, "forward", lambda x: x),
    "class": lambda layer: setattr(layer, "__class__", type("Other", (Layer,), {})),
    "child": lambda layer: setattr(layer, "child", nn.Linear(3, 3)),
    "new child": lambda layer: layer.add_module("more", nn.Identity()),
    "no child": lambda layer: delattr(layer, "child"),
    "a child's training": lambda layer: layer.child.train(not layer.child.training),
    "hook": _hook,
    "parameter": lambda layer: setattr(layer, "bias", nn.Parameter(torch.zeros(3))),
    "buffer that was None": lambda layer: setattr(layer, "missing", torch.ones(1)),
    "write to a large tensor": _write_large,
    "write that nobody counts": _write_unseen,
    "memory": lambda layer: setattr(layer.weight, "data", torch.zeros(LARGE)),
    "swapped": lambda layer: torch.utils.swap_tensors(layer.bias, nn.Parameter(torch.zeros(3))),
    "order": lambda layer: layer._parameters.update(bias=layer._parameters.pop("bias")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_module_are_seen(change: str, watch: None) -> None:
    layer = Layer()
    found = Sources([layer])
    assert found.are_current()
    CHANGES[change](layer)
    assert not found.are_current()
    found.note()
    assert found.are_current()


def test_hooks_of_the_owner_are_torchs_to_call(watch: None) -> None:
    layer = Layer()
    found = Sources([layer.child], owner=layer)
    _hook(layer)
    assert found.are_current()
    layer.eps = 1
    assert not found.are_current()


def test_hooks_for_all_modules_are_seen(watch: None) -> None:
    found = Sources([Layer()])
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not found.are_current()
    handle.remove()
    assert found.are_current()


def test_values_that_are_read_anew_may_be_others(watch: None) -> None:
    layer = Layer()
    found = Sources([layer], values=False)
    layer.bias = nn.Parameter(torch.ones(3))
    _write_large(layer)
    assert found.are_current()
    layer.missing = torch.ones(1)
    assert not found.are_current()
    layer.missing = None
    assert found.are_current()
    layer.scale = None
    assert not found.are_current()


def test_tensors_settings_and_names_are_seen(watch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, config = torch.zeros(4), SimpleNamespace(width=3)
    module = sys.modules[__name__]
    found = Sources(
        [],
        [tensor],
        settings=[(config, "width")],
        names=[(__name__, "FACTOR"), (__name__, "doubled")],
    )
    with monkeypatch.context() as patch:
        patch.setattr(module, "FACTOR", 3.0)
        assert not found.are_current()
    with monkeypatch.context() as patch:
        patch.setattr(doubled, "__code__", (lambda x: 3 * x).__code__)
        assert not found.are_current()
    assert found.are_current()
    config.width = 4
    assert not found.are_current()
    config.width = 3
    assert found.are_current()
    tensor[0] = 1
    assert not found.are_current()


@pytest.mark.parametrize("name", ["extra_repr", "later"])
def test_names_that_code_looks_up_in_a_module_are_seen(name: str, watch: None) -> None:
    layer = Layer()
    found = Sources([layer], methods=[(layer, name)])
    layer.unread = 1  # no code asks for it
    assert found.are_current()
    setattr(layer, name, lambda: "other")
    assert not found.are_current()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda own: pickle.loads(pickle.dumps(own))])
@pytest.mark.parametrize("values", [True, False])
def test_a_copy_is_compared_with_what_it_is_a_copy_of(
    copied: Callable[[Any], Any], values: bool, watch: None
) -> None:
    layer = Layer()
    again, found = copied((layer, Sources([layer], values=values)))
    assert found.are_current() is not values  # values that were copied are not known to be the same
    found.note()
    assert found.are_current()
    again.eps = 1
    assert not found.are_current()


def test_a_copy_of_what_was_lost_is_lost(watch: None) -> None:
    layer = Layer()
    found = Sources([layer], values=False)
    layer.eps = 1
    assert not copy.deepcopy((layer, found))[1].are_current()
