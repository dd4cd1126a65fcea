"""Uses of split weights in the midst of training, under every rule: as float32 weights do."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import optimizers
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import oxytorch
from split_models import network

State = dict[str, Tensor]


class _Training:
    """A model and its optimizers, of one rule, that are given gradients which bfloat16 holds."""

    def __init__(self, name: str, options: dict[str, Any], *, splits: bool, part: str) -> None:
        self.name, self.options, self.splits = name, options, splits
        self.model: Any = network()
        first = self.optimizer(self.model.get_submodule(part).parameters())
        if splits:
            self.model, first = oxytorch.optimize(
                self.model, optimizer=first, dtype=torch.bfloat16, inplace=True
            )
        self.optimizers: list[Any] = [first]

    def optimizer(self, parameters: Any) -> Any:
        return optimizers.make(self.name, parameters, **self.options)

    def rest(self) -> list[nn.Parameter]:
        return [*self.model.body.parameters(), self.model.projection]

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in self.model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).mul(0.1).bfloat16().to(p.dtype)
        for optimizer in self.optimizers:
            optimizer.step()


def _write(t: _Training) -> None:
    with torch.no_grad():
        t.model.head.weight.mul_(0.9999)
    t.model.projection.data.add_(1e-4)
    t.model.head.bias.data = torch.full((3,), 1 / 3)


def _assign_state(t: _Training) -> None:
    t.optimizers[0].state = defaultdict(dict)


def _other_optimizer(t: _Training) -> None:
    state = copy.deepcopy(t.optimizers[0].state_dict())
    t.optimizers = [t.optimizer(t.model.parameters())]
    t.optimizers[0].load_state_dict(state)


def _copied(t: _Training) -> None:
    t.model, t.optimizers = copy.deepcopy((t.model, t.optimizers))


def _pickled(t: _Training) -> None:
    t.model, t.optimizers = pickle.loads(pickle.dumps((t.model, t.optimizers)))


def _undone(t: _Training) -> None:
    if t.splits:
        oxytorch.undo(t.model)


def _unfrozen(t: _Training) -> None:
    t.optimizers[0].add_param_group({"params": t.rest(), "lr": 1e-4})


def _second(t: _Training) -> None:
    t.optimizers.append(t.optimizer(t.rest()))


def _swapped(t: _Training) -> None:
    t.optimizers[0].zero_grad()
    torch.utils.swap_tensors(t.model.body[3].weight, t.model.projection)


USES: dict[str, Callable[[_Training], Any]] = {
    "state cleared": lambda t: t.optimizers[0].state.clear(),
    "state assigned": _assign_state,
    "state of one weight popped": lambda t: t.optimizers[0].state.pop(t.model.head.weight, None),
    "state loaded": lambda t: t.optimizers[0].load_state_dict(
        copy.deepcopy(t.optimizers[0].state_dict())
    ),
    "another optimizer": _other_optimizer,
    "written": _write,
    "copied": _copied,
    "pickled": _pickled,
    "float": lambda t: t.model.float(),
    "undone": _undone,
    "swapped": _swapped,
    "group added": _unfrozen,
    "second optimizer": _second,
}
"""What is done after two steps; of the last two, the optimizer holds the head alone before."""
LATER = ("group added", "second optimizer")

AVERAGES: dict[str, Callable[[nn.Module], Any]] = {
    "mean": AveragedModel,
    "moving": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
}


def _states(name: str, options: dict[str, Any], use: str, splits: bool) -> list[State]:
    """The weights after each step, and of averages and of a copy that is trained alone."""
    part = "head" if use in LATER else ""
    t = _Training(name, options, splits=splits, part=part)
    averages = {key: made(t.model) for key, made in AVERAGES.items()}
    states: list[State] = []
    for seed in range(5):
        if seed == 2:
            USES[use](t)
        t.step(seed)
        for average in averages.values():
            average.update_parameters(t.model)
        states.append(copy.deepcopy(t.model.state_dict()))
    alone = copy.deepcopy(t)
    alone.model = copy.deepcopy(t.model)
    alone.optimizers = [alone.optimizer(alone.model.parameters())]
    alone.step(7)
    return [*states, *(a.module.state_dict() for a in averages.values()), alone.model.state_dict()]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("name", "options"), optimizers.CASES, ids=optimizers.IDS)
def test_weights_are_those_of_float32(name: str, options: dict[str, Any], use: str) -> None:
    plain, split = (_states(name, options, use, splits) for splits in (False, True))
    for number, (expected, found) in enumerate(zip(plain, split, strict=True)):
        for key, value in expected.items():
            assert found[key].dtype == torch.float32, (number, key)
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)
