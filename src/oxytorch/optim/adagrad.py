"""Adagrad and RMSprop: learning rates by the squares of gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .groups import Group, rate
from .optimizer import FusedOptimizer


class Adagrad(FusedOptimizer, torch.optim.Adagrad):
    """torch.optim.Adagrad with fused steps and the formats of `FusedOptimizer`."""

    rule = "adagrad"
    state_names = ("sum",)

    def _initial(self, name: str, parameter: Tensor, group: Group) -> Tensor:
        return torch.full_like(parameter, self.defaults["initial_accumulator_value"])

    def _hyper(self, group: Group) -> tuple[Any, ...]:
        return (rate(group), group["lr_decay"], group["weight_decay"], group["eps"])


class RMSprop(FusedOptimizer, torch.optim.RMSprop):
    """torch.optim.RMSprop with fused steps and the formats of `FusedOptimizer`.

    With `centered`, state_dtype is that of the momentum only: the variance is the difference of the
    two means, which rounded to fewer bits may be zero or less.
    """

    rule = "rmsprop"
    state_names = ("square_avg", "momentum_buffer", "grad_avg")

    def _names(self, group: Group) -> tuple[str, ...]:
        # A state that the options do not use is stood in for by one that they do.
        return (
            "square_avg",
            "momentum_buffer" if group["momentum"] > 0 else "square_avg",
            "grad_avg" if group["centered"] else "square_avg",
        )

    def _state_dtype(self, parameter: Tensor, group: Group, name: str) -> torch.dtype:
        if group["centered"] and group["state_dtype"] is not None and name != "momentum_buffer":
            return torch.float32
        return super()._state_dtype(parameter, group, name)

    def _hyper(self, group: Group) -> tuple[Any, ...]:
        return (
            rate(group),
            group["alpha"],
            group["eps"],
            group["weight_decay"],
            group["momentum"],
            group["centered"],
        )
