"""Dictionaries of modules that are replaced by other ones with the same content, and then changed.

`del sequential[i]` does so with its children, and `module._forward_hooks = OrderedDict()` is how
many remove all hooks.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import oxytorch


def _sequence() -> nn.Sequential:
    gelu = [nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256)]
    return nn.Sequential(*gelu).eval()


def _normalized() -> nn.Sequential:
    layers = [nn.Linear(256, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 256)]
    return nn.Sequential(*layers).eval()


def _doubled(module: nn.Module, given: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 2


def _added_first(module: nn.Module, given: Any) -> Any:
    return (given[0] + 1,)


def _append_and_pop(model: Any) -> None:
    model.append(nn.Tanh())
    model.pop(-1)


def _no_hooks(model: Any) -> None:
    for module in model.modules():
        module._forward_hooks = OrderedDict()
        module._forward_pre_hooks = OrderedDict()


def _same_children(model: Any) -> None:
    model._modules = dict(model._modules)


def _same_buffers(model: Any) -> None:
    model[1]._buffers = dict(model[1]._buffers)


def _hook_before(model: Any) -> None:
    model[1].register_forward_pre_hook(_added_first)


Change = Callable[[Any], Any]

CASES: dict[str, tuple[Callable[[], nn.Module], Change, Change]] = {
    "appended": (_sequence, _append_and_pop, lambda model: model.append(nn.Tanh())),
    "replaced": (_sequence, _append_and_pop, lambda model: model.__setitem__(1, nn.ReLU())),
    "hook": (_sequence, _no_hooks, lambda model: model[1].register_forward_hook(_doubled)),
    "pre-hook": (_sequence, _no_hooks, _hook_before),
    "child": (_sequence, _same_children, lambda model: model.__setitem__(1, nn.ReLU())),
    "buffer": (
        _normalized,
        _same_buffers,
        lambda model: setattr(model[1], "running_mean", torch.full((512,), 3.0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "options", [{}, {"graph": False}, {"graph": True, "passes": ["program"]}, {"inplace": True}]
)
@pytest.mark.parametrize("name", CASES)
def test_changes_after_it_are_seen(name: str, options: dict[str, Any]) -> None:
    make, replace, change = CASES[name]
    original, x = make(), torch.randn(32, 256)
    model = oxytorch.optimize(copy.deepcopy(original), sample_input=x, **options)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(x), original(x))
        for each in (replace, change):
            each(original)
            each(model)
            for _ in range(3):
                torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-5)


def test_an_equal_dictionary_changes_nothing() -> None:
    """What was made of a model is used on."""
    x = torch.randn(32, 256)
    model = oxytorch.optimize(_sequence(), sample_input=x, graph=False)
    regions = [m.forward for m in model.modules() if hasattr(m.__dict__.get("forward"), "programs")]
    assert regions
    _append_and_pop(model)
    _no_hooks(model)
    assert all(program.is_current() for region in regions for program in region.programs)
    model[1].register_forward_hook(_doubled)
    assert not all(program.is_current() for region in regions for program in region.programs)
