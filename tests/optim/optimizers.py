"""Optimizers, options and small weights that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oxytorch import isa, optim, testing

LEVELS = [level.name for level in isa.levels() if level.supported]

SHAPES = [(37, 29), (7,), (), (64, 80), (3, 5, 7, 2), (0, 4), (1030,)]

# Options that reach every flag of every rule.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9, "nesterov": True},
    ],
    "Adam": [
        {},
        {"weight_decay": 0.1, "maximize": True},
        {"amsgrad": True, "betas": (0.3, 0.4)},
        {"amsgrad": True, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}, {"weight_decay": 0.0, "eps": 1e-3}],
    "Adagrad": [
        {},
        {"lr_decay": 0.01, "weight_decay": 0.1, "maximize": True},
        {"initial_accumulator_value": 0.5, "eps": 1e-3},
    ],
    "RMSprop": [
        {},
        {"centered": True},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.5, "centered": True, "alpha": 0.3, "maximize": True},
    ],
    "Adafactor": [
        {},
        {"weight_decay": 0.1, "maximize": True, "d": 1.5},
        {"eps": (1e-3, 1e-2), "beta2_decay": -0.3},
    ],
    "Lion": [{}, {"weight_decay": 0.1, "maximize": True}],
    "Lamb": [{}, {"weight_decay": 0.1, "maximize": True}],
    "Lars": [{}, {"momentum": 0.9, "weight_decay": 0.1, "epsilon": 1e-3, "maximize": True}],
}

CASES = [(name, options) for name, several in OPTIONS.items() for options in several]
IDS = [f"{name}-{'-'.join(options) or 'plain'}" for name, options in CASES]

MEASURED = ("Adafactor", "Lamb", "Lars")
"""Those whose steps depend on norms, which are summed in another order."""

STOCK = [c for c in CASES if hasattr(torch.optim, c[0]) and c[0] not in MEASURED]
STOCK_IDS = [i for i, case in zip(IDS, CASES, strict=True) if case in STOCK]


def make(name: str, parameters: Iterable[Tensor], **options: Any) -> optim.FusedOptimizer:
    """Our optimizer of that name, with a learning rate that moves weights visibly."""
    optimizer = getattr(optim, name)(list(parameters), lr=0.01, **options)
    assert isinstance(optimizer, optim.FusedOptimizer)
    return optimizer


def weights(seed: int = 0) -> list[Tensor]:
    """float32 weights of many shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def give_gradients(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Gradients that bfloat16 holds exactly, in the dtype of each parameter."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
            parameter.grad = gradient.to(parameter.dtype)


def train(optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[Tensor]:
    """Steps number `first` and following; the parameters."""
    for step in range(first, first + steps):
        give_gradients(optimizer, step)
        optimizer.step()
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def assert_same_state(actual: dict[str, Any], wanted: dict[str, Any]) -> None:
    """The same keys with the same bits; torch keeps None where it has no momentum."""
    wanted = {key: value for key, value in wanted.items() if value is not None}
    assert actual.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(actual[key], value), key


class Sweeps(TorchDispatchMode):
    """Records the names of operators that are given a tensor of more than one element."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(tensor.numel() > 1 for tensor in testing.tensors_in(list(args))):
            self.names.append(function._overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def assert_same_numbers(name: str, actual: list[Tensor], expected: list[Tensor]) -> None:
    """The same bits; nearly the same of optimizers that measure norms.

    These are summed in another order, which may turn a random rounding over.
    """
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        if name in MEASURED:
            _assert_near(a, b)
        else:
            assert torch.equal(a, b)


def _assert_near(actual: Tensor, wanted: Tensor) -> None:
    if actual.is_floating_point():
        torch.testing.assert_close(actual, wanted, rtol=2e-2, atol=1e-4, equal_nan=True)
    else:
        assert ((actual.float() - wanted.float()).abs() > 1).float().mean() < 0.05 or (
            actual.dtype == torch.int16
        )
