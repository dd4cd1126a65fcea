"""Stochastic gradient descent, with a learning rate for each tensor (Lars) or without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from .batch import Batch
from .executor import Update
from .groups import Group, check_at_least_zero, rate
from .optimizer import FusedOptimizer
from .states import State

BUFFER = "momentum_buffer"


class _Momentum(FusedOptimizer):
    """A momentum buffer that begins as the first gradient."""

    state_names = (BUFFER,)

    def _names(self, group: Group) -> tuple[str, ...]:
        return self.state_names if group["momentum"] != 0 else ()

    def _begin(self, parameter: Tensor, group: Group, state: State, names: Sequence[str]) -> None:
        # torch counts no steps here; random rounding needs them.
        is_random = bool(names) and group["state_dtype"] in (torch.bfloat16, torch.int8)
        if is_random and "step" not in state:
            state["step"] = self._store.first_step(parameter)
        if names and state.get(BUFFER) is None:
            self._write(parameter, group, BUFFER, self._initial(BUFFER, parameter, group))
        elif names and state[BUFFER].layout is not torch.strided:
            self._write(parameter, group, BUFFER, state[BUFFER].to_dense())
        if names and state[BUFFER].stride() != parameter.stride():
            # The parameter was given memory of another layout.
            self._conform(parameter, group)

    def _updates(
        self, group: Group, rng_stream: int, others: Set[int]
    ) -> Iterator[tuple[Update, bool]]:
        """Tensors without a buffer make their first step in an update of its own."""
        names = self._names(group)
        first, later = Batch.of(names), Batch.of(names)
        begins: bool | None = None
        for position, parameter in enumerate(group["params"]):
            if parameter.grad is None or id(parameter) in others:
                continue
            state = self.state[parameter]
            is_first = bool(names) and state.get(BUFFER) is None
            if is_first and group.get("dampening"):
                # A buffer of zeros would become a dampened gradient in the next step, and not, as
                # here, the gradient. Without dampening they are the same, and nothing has to wait.
                begins = not self._scaling(group).is_left_out if begins is None else begins
                if not begins:
                    continue
            self._begin(parameter, group, state, names)
            low_bits = self._store.current_low_bits(parameter, group)
            batch = first if is_first else later
            batch.add(parameter, state, names, rng_stream + position, low_bits)
        yield self._update(later, group, (False,)), begins is not False
        if first.parameters:
            yield self._update(first, group, (True,)), False


class SGD(_Momentum, torch.optim.SGD):
    """torch.optim.SGD with fused steps and the formats of `FusedOptimizer`."""

    rule = "sgd"

    def _hyper(self, group: Group) -> tuple[Any, ...]:
        return (
            rate(group),
            group["momentum"],
            group["dampening"],
            float(group["weight_decay"]),
            group["nesterov"],
        )


class Lars(_Momentum):
    """SGD whose learning rate is scaled for each tensor (You, Gitman and Ginsburg 2017).

    The learning rate is multiplied by eeta |parameter| / (|gradient| + weight_decay |parameter| +
    epsilon), by 1 where the parameter or the gradient is zero. Groups with `lars=False`, for biases
    and norms, are plain SGD without decay of weights.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        momentum: factor of the momentum.
        eeta: the trust coefficient.
        weight_decay: factor of the parameter that is added to the gradient.
        epsilon: added to the denominator.
        maximize: goes up instead of down.
    """

    rule = "lars"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        eeta: float = 1e-3,
        weight_decay: float = 0.0,
        epsilon: float = 0.0,
        *,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        check_at_least_zero(
            "Lars", lr=lr, momentum=momentum, eeta=eeta, weight_decay=weight_decay, epsilon=epsilon
        )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "eeta": eeta,
            "weight_decay": weight_decay,
            "epsilon": epsilon,
            "maximize": maximize,
            "lars": True,
        }
        super().__init__(params, defaults, **options)

    def _rule(self, group: Group) -> str:
        return "lars" if group["lars"] else "sgd"

    def _hyper(self, group: Group) -> tuple[Any, ...]:
        lr, momentum = rate(group), group["momentum"]
        if not group["lars"]:
            return (lr, momentum, 0.0, 0.0, False)
        return (lr, momentum, group["eeta"], group["weight_decay"], group["epsilon"])
