"""Lamb and Lion, which torch does not have."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .groups import Group, check_at_least_zero, rate
from .optimizer import FusedOptimizer


def _check_betas(name: str, betas: tuple[float, float]) -> None:
    for beta in betas:
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"{name}: expected betas in [0, 1), got {betas}")


class Lamb(FusedOptimizer):
    """Adam whose step is scaled for each tensor (You and others 2020).

    The step is Adam's direction plus weight_decay times the parameter, multiplied by lr and by
    |parameter| / |direction|, without bounds; by 1 where either is zero.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        betas: factors of the running means of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: factor of the parameter that is added to the direction.
        maximize: goes up instead of down.
    """

    rule = "lamb"
    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        check_at_least_zero("Lamb", lr=lr, eps=eps, weight_decay=weight_decay)
        _check_betas("Lamb", betas)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **options)

    def _hyper(self, group: Group) -> tuple[Any, ...]:
        return (rate(group), *group["betas"], group["eps"], group["weight_decay"])


class Lion(FusedOptimizer):
    """Steps by the sign of the momentum (Chen and others 2023).

    Args:
        params: parameters, or groups of them.
        lr: the learning rate, three to ten times smaller than for AdamW.
        betas: factors of the momentum in the step and in the momentum that is kept.
        weight_decay: the parameter is multiplied by 1 - lr weight_decay.
        maximize: goes up instead of down.
    """

    rule = "lion"
    state_names = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        check_at_least_zero("Lion", lr=lr, weight_decay=weight_decay)
        _check_betas("Lion", betas)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **options)

    def _hyper(self, group: Group) -> tuple[Any, ...]:
        return (rate(group), *group["betas"], group["weight_decay"])
