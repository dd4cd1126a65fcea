"""Adagrad and RMSprop: learning rates by the squares of gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ._base import FusedOptimizer, Group


class Adagrad(FusedOptimizer, torch.optim.Adagrad):
    """torch.optim.Adagrad with fused steps and the formats of `FusedOptimizer`."""

    rule = "adagrad"
    state_names = ("sum",)

    def _initial(self, name: str, parameter: Tensor, group: Group) -> Tensor:
        return torch.full_like(parameter, self.defaults["initial_accumulator_value"])

    def _hyper(self, group: Group) -> tuple[float, ...]:
        return (float(group["lr"]), group["lr_decay"], group["weight_decay"], group["eps"])


class RMSprop(FusedOptimizer, torch.optim.RMSprop):
    """torch.optim.RMSprop with fused steps and the formats of `FusedOptimizer`."""

    rule = "rmsprop"
    state_names = ("square_avg", "momentum_buffer", "grad_avg")

    def _names(self, group: Group) -> tuple[str, ...]:
        # A state that the options do not use is stood in for by one that they do.
        return (
            "square_avg",
            "momentum_buffer" if group["momentum"] > 0 else "square_avg",
            "grad_avg" if group["centered"] else "square_avg",
        )

    def _hyper(self, group: Group) -> tuple[float, ...]:
        return (
            float(group["lr"]),
            group["alpha"],
            group["eps"],
            group["weight_decay"],
            group["momentum"],
            group["centered"],
        )
