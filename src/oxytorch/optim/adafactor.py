"""Adafactor: second moments of matrices as a row and a column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..ops.mean_squares import mean_squares
from . import sharding
from .batch import SCALES, Batch, Scaling
from .executor import Update
from .groups import Group, rate
from .optimizer import FusedOptimizer
from .states import State, is_split
from .stock import DENSE_ALONE, REAL_ALONE

ROW, COLUMN, VARIANCE = "row_var", "col_var", "variance"


class Adafactor(FusedOptimizer, torch.optim.Adafactor):
    """torch.optim.Adafactor with fused steps and the formats of `FusedOptimizer`.

    The factors of matrices are float32 whatever state_dtype is: they weigh nothing. Takes the
    scale of a GradScaler, which torch's class refuses, and no sharded parameters.
    """

    rule = "adafactor"
    state_names = (VARIANCE,)

    def _others(self, group: Group) -> list[Tensor]:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.is_complex():
                raise RuntimeError(f"Adafactor: {REAL_ALONE}")
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise RuntimeError(f"Adafactor: {DENSE_ALONE}")
            if sharding.is_sharded(parameter):
                raise TypeError(
                    "Adafactor: expected plain parameters, got a DTensor: its rows and columns "
                    "are sharded over several processes"
                )
        return super()._others(group)

    def _updates(
        self, group: Group, rng_stream: int, others: Set[int]
    ) -> Iterator[tuple[Update, bool]]:
        vectors, matrices = (Batch.of(self.state_names) for _ in range(2))
        copies: list[tuple[Tensor, Tensor]] = []
        for position, parameter in enumerate(group["params"]):
            if parameter.grad is None or parameter.numel() == 0 or id(parameter) in others:
                continue
            state = self.state[parameter]
            low_bits = self._store.current_low_bits(parameter, group)
            if parameter.dim() > 1:
                self._begin(parameter, group, state, ())
                _begin_factors(parameter, state)
                whole = {**state, VARIANCE: state[COLUMN], VARIANCE + SCALES: state[ROW]}
                matrices.add(parameter, whole, self.state_names, rng_stream + position, low_bits)
                copies += matrices.make_last_contiguous()
            else:
                self._begin(parameter, group, state, self.state_names)
                vectors.add(parameter, state, self.state_names, rng_stream + position, low_bits)
        yield self._update(vectors, group, (False,)), True
        yield replace(self._update(matrices, group, (True,)), before=_move_factors), True
        for kept, copy in copies:
            kept.copy_(copy)

    def _hyper(self, group: Group) -> tuple[Any, ...]:
        eps1, eps2 = group["eps"]
        if eps1 is None:
            # Of the first parameter, as torch has it; a split one is float32.
            used = (own for own in group["params"] if own.grad is not None and own.numel())
            first = next(used, None)
            dtype = torch.float32
            if first is not None and not is_split(first, group):
                dtype = first.dtype
            eps1 = torch.finfo(dtype).eps
        return (
            rate(group),
            *(group["beta2_decay"], eps1, eps2, group["d"], group["weight_decay"]),
        )


def _begin_factors(parameter: Tensor, state: State) -> None:
    for name, dim in ((ROW, -1), (COLUMN, -2)):
        shape = list(parameter.shape)
        shape[dim] = 1
        factor = state.get(name)
        if factor is None:
            state[name] = torch.zeros(shape, dtype=torch.float32, device=parameter.device)
        elif factor.dtype != torch.float32 or not factor.is_contiguous():
            state[name] = factor.float().contiguous()


def _move_factors(batch: Batch, hyper: Sequence[float], scaling: Scaling) -> None:
    """Moves rows and columns towards this step's means; gives the batch their products."""
    if scaling.is_left_out:
        return
    factor = scaling.gradient_factor
    _, beta2_decay, eps1, *_ = hyper
    rows, columns = batch.scales[0], batch.states[0]
    for place, (row, column) in enumerate(zip(rows, columns, strict=True)):
        weight = (batch.steps[place].item() + 1) ** beta2_decay
        gradient = batch.gradients[place]
        # Rows and columns are float32 whatever the parameter is.
        means = mean_squares(gradient.float() if gradient.dtype == torch.float64 else gradient)
        for own, mean in zip((row, column), means, strict=True):
            own.lerp_(mean if factor * factor == 1 else mean * factor**2, weight)
        rows[place] = row / row.mean(-2, keepdim=True).clamp_(min=eps1)
