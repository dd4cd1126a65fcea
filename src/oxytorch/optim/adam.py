"""Adam and AdamW."""

from __future__ import annotations

from typing import Any

import torch

from .groups import Group, rate
from .optimizer import FusedOptimizer


class Adam(FusedOptimizer, torch.optim.Adam):
    """torch.optim.Adam with fused steps and the formats of `FusedOptimizer`."""

    rule = "adam"
    state_names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def _names(self, group: Group) -> tuple[str, ...]:
        return self.state_names if group["amsgrad"] else self.state_names[:2]

    def _hyper(self, group: Group) -> tuple[Any, ...]:
        beta1, beta2 = group["betas"]
        return (
            rate(group),
            float(beta1),
            float(beta2),
            group["eps"],
            float(group["weight_decay"]),
            group["amsgrad"],
            group["decoupled_weight_decay"],
        )


class AdamW(Adam, torch.optim.AdamW):
    """torch.optim.AdamW with fused steps and the formats of `FusedOptimizer`."""
