"""Runs the updates of a step: by kernels of a GPU, by the compiled op, or by the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.optimizer_step import op
from ..ops.optimizer_step.layout import REDUCE_NORMS, SUMS, UPDATE, WHOLE
from ..ops.optimizer_step.reference import has_norms
from . import sharding
from .batch import Batch, Scaling, given, is_fused, whole_parameters
from .gpu import step_cache
from .gpu.step_cache import CachedLaunch

Hyper = Sequence[Any]


@dataclass(frozen=True)
class Update:
    """A batch, and how a rule updates it.

    hyper: of the group; the learning rate may be a tensor on a GPU.
    flags: hyper-parameters beyond those.
    is_random: bfloat16 states are rounded at random.
    before: what runs first on the CPU.
    """

    rule: str
    batch: Batch
    hyper: Hyper
    flags: tuple[bool, ...]
    scaling: Scaling
    is_random: bool
    seed: int
    before: Callable[[Batch, Sequence[float], Scaling], None] | None = None


class Executor:
    """Runs updates; those that need norms of sharded parameters end together."""

    def __init__(self) -> None:
        # What graphs that were captured read whenever they run.
        self.captured: list[Any] = []
        self._deferred: list[DeferredUpdate] | None = None

    def run(self, update: Update) -> list[CachedLaunch] | None:
        """Updates the batch. Returns launches that do the same again; None where there are none."""
        launches: list[CachedLaunch] | None = []
        for batch in update.batch.by_device() if update.batch.parameters else []:
            launch = step_cache.plan(
                *(update.rule, batch, update.hyper, update.flags, update.is_random, update.seed)
            )
            if launch is not None:
                self.launch(launch, update.hyper, update.scaling)
                batch.bump_versions()
                if launches is not None:
                    launches.append(launch)
                continue
            launches = None
            hyper = [*map(float, (*update.hyper, *update.flags))]
            if update.before is not None:
                update.before(batch, hyper, update.scaling)
            step = op.function if all(map(is_fused, batch.parameters)) else op.reference
            call = (update.rule, batch, hyper, update.scaling, update.is_random, update.seed)
            run = functools.partial(run_step, step, *call)
            if not batch.wholes or not has_norms(update.rule):
                run()
            else:
                self._defer(DeferredUpdate(run, whole_parameters(batch), empty_sums(batch)))
        return None if update.batch.has_copies else launches

    def launch(self, launch: CachedLaunch, hyper: Hyper, scaling: Scaling) -> None:
        """Launches a step, of shards with norms only the first half."""
        if launch.needs_sums_of_shards:
            run = functools.partial(launch.run, hyper, scaling)
            self._defer(DeferredUpdate(run, launch.wholes, launch.plan.sums))
        else:
            launch.run(hyper, scaling)
        if launch.plan.table.is_captured and launch.plan not in self.captured:
            self.captured.append(launch.plan)

    def _defer(self, update: DeferredUpdate) -> None:
        update.run(sums=update.sums, phase=REDUCE_NORMS)
        if self._deferred is None:
            finish([update])
        else:
            self._deferred.append(update)

    @contextmanager
    def norms_together(self) -> Iterator[None]:
        """Updates inside that need norms of sharded parameters end after one message for all."""
        self._deferred = []
        try:
            yield
            if self._deferred:
                finish(self._deferred)
        finally:
            self._deferred = None


class DeferredUpdate(NamedTuple):
    """An update of shards whose first sweep is done and whose second waits for sums over all.

    run: takes `sums` and `phase` as `run_step` does, all else is bound.
    wholes: the sharded or plain parameters.
    sums: float64 [len(wholes), SUMS].
    """

    run: Callable[..., None]
    wholes: Sequence[Tensor]
    sums: Tensor


@torch.no_grad()
def finish(updates: Sequence[DeferredUpdate]) -> None:
    """Combines the sums of all processes, of all updates in one message, and ends the updates."""
    sums = torch.cat([update.sums for update in updates])
    sharding.add_shards_(sums, [whole for update in updates for whole in update.wholes])
    parts = torch.split(sums, [len(update.sums) for update in updates])
    for update, part in zip(updates, parts, strict=True):
        update.run(sums=update.sums.copy_(part), phase=UPDATE)


def run_step(
    step: Callable[..., None],
    rule: str,
    batch: Batch,
    hyper: Sequence[float],
    scaling: Scaling,
    stochastic: bool = False,
    seed: int = 0,
    sums: Tensor | None = None,
    phase: int = WHOLE,
) -> None:
    """Updates parameters, states and steps in place.

    step: the op or its reference.
    sums, phase: as the op has them.
    """
    if not batch.parameters:
        return
    step(
        batch.parameters,
        given(batch.low_bits),
        batch.gradients,
        [tensor for state in batch.states for tensor in state],
        given([tensor for state in batch.scales for tensor in state]),
        batch.steps,
        batch.rng_streams,
        rule,
        hyper,
        _on_host(scaling.gradient_scale),
        _on_host(scaling.found_inf),
        scaling.whole_factor,
        stochastic,
        seed,
        sums,
        phase,
    )
    if phase != REDUCE_NORMS:
        batch.bump_versions()


def empty_sums(batch: Batch) -> Tensor:
    """Sums of a reduction, zeros."""
    parameters = batch.parameters
    return torch.zeros(len(parameters), SUMS, dtype=torch.float64, device=parameters[0].device)


def _on_host(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None else tensor.cpu()
