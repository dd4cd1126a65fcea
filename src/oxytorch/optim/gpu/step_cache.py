"""Steps of groups on GPUs: planned once, repeated as long as nothing has moved."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import batch as _step
from .. import sharding
from . import address_guard, devices
from ..state_table import Table
from ..groups import Group
from .address_guard import Moved

if TYPE_CHECKING:
    from ..optimizer import FusedOptimizer
    from .launch_plan import Plan


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Part:
    """A plan, and what it takes to run it again.

    flags: hyper-parameters of the call beyond those of the group. wholes: the parameters, or those
    whose shards they are, in the plan's order.
    """

    plan: Plan
    flags: tuple[bool, ...]
    wholes: list[Tensor]


class Record:
    """What the step of a group was."""

    def __init__(
        self, optimizer: FusedOptimizer, group: Group, stream: int, parts: Sequence[Part]
    ) -> None:
        """The optimizer's states have to be counted. stream: of the group's first parameter."""
        self._parts = list(parts)
        self._parameters = [*group["params"]]
        self._stream = stream
        self._settings: Hashable = optimizer._settings(group)
        assert isinstance(optimizer.state, Table)
        self._state = optimizer.state
        self._changes = optimizer.state.changes.count
        planned = {id(whole) for part in parts for whole in part.wholes}
        rest = [own for own in self._parameters if id(own) not in planned]
        self._watches = []
        for part in parts:
            halves = [optimizer._kept_halves(own) for own in part.wholes]
            kept = _kept(optimizer, part.wholes)
            watch = address_guard.watch(kept, part.wholes, part.plan.addresses, halves)
            self._watches.append((watch, part))
        # They may get a gradient, or lose an empty one.
        addresses = torch.zeros(sum(own.grad is not None for own in rest), 1, dtype=torch.int64)
        self._rest = address_guard.watch([], rest, addresses) if rest else None

    def settle(self, before: int, now: int) -> None:
        """Tells that no change of states from number `before` to `now` was one of the record's."""
        if self._changes == before:
            self._changes = now

    def repeat(self, optimizer: FusedOptimizer, group: Group, stream: int) -> bool:
        """Does the step again and returns True, unless the group has to be looked at anew."""
        parameters = group["params"]
        if (
            self._state is not optimizer.state
            or not self._state.is_counted
            or self._changes != self._state.changes.count
            or self._stream != stream
            or len(parameters) != len(self._parameters)
            or not all(map(is_, parameters, self._parameters))
            or self._settings != optimizer._settings(group)
        ):
            return False
        if self._rest is not None and self._rest.compare() is Moved.OTHER:
            return False
        hyper = optimizer._hyper(group)
        for watch, part in self._watches:
            moved = watch.compare()
            if moved is Moved.OTHER or not part.plan.fits((*hyper, *part.flags)):
                return False
            if moved is Moved.GRADIENTS:
                part.plan.moved()
        scaling = optimizer._scaling(group)
        for watch, part in self._watches:
            launch(optimizer, part, (*hyper, *part.flags), scaling)
            watch.bump_versions()
        return True


def _kept(optimizer: FusedOptimizer, parameters: Sequence[Tensor]) -> list[Tensor]:
    """All tensors whose memory a step over the parameters uses but for their gradients."""
    states = (optimizer.state[own].values() for own in parameters)
    return [*parameters, *(v for own in states for v in own if isinstance(v, Tensor))]


def load(parameters: Sequence[Tensor]) -> None:
    """Imports what steps over the parameters need, so that the first one need not wait for it."""
    # Programs that stay on the processor do without.
    if any(devices.find(device) for device in {own.device for own in parameters}):
        from . import launch_plan  # noqa: F401


def plan(
    optimizer: FusedOptimizer,
    rule: str,
    batch: _step.Batch,
    group: Group,
    hyper: tuple[Any, ...],
    flags: tuple[bool, ...],
) -> Part | None:
    """A plan for the batch, which is on one device; None where that has no kernels for it."""
    from ...gpu.errors import NoKernelError
    from .launch_plan import Plan

    device = devices.find(batch.parameters[0].device)
    if device is None or not all(map(is_planned, batch.parameters)):
        return None
    stochastic = group["state_dtype"] == torch.bfloat16
    try:
        made = Plan(rule, batch, (*hyper, *flags), stochastic, group["seed"], device)
    except NoKernelError as error:
        if error.forced:
            raise
        devices.give_up(device.device, str(error))
        return None
    wholes = _step.whole_parameters(batch)
    return Part(made, flags, [wholes[place] for place in made.order])


def launch(
    optimizer: FusedOptimizer, part: Part, hyper: tuple[Any, ...], scaling: _step.Scaling
) -> None:
    """Runs a plan; of shards with norms only the first half, the rest when all are measured."""
    plan = part.plan
    if len(plan.sums) and any(map(sharding.is_sharded, part.wholes)):
        run = functools.partial(_run_phase, plan, hyper, scaling)
        optimizer._await_sums(_step.Measured(run, part.wholes, plan.sums))
    else:
        plan.run(hyper, scaling)
    if plan.is_captured and plan not in optimizer._captured:
        optimizer._captured.append(plan)


def _run_phase(
    plan: Plan, hyper: tuple[Any, ...], scaling: _step.Scaling, sums: Tensor, phase: int
) -> None:
    assert sums is plan.sums
    plan.run(hyper, scaling, phase)


def may_plan(parameters: Sequence[Tensor]) -> bool:
    """False if there is certainly no GPU kernel for any of the parameters."""
    return not all(map(_step.IS_CPU, parameters)) or devices.find(_CPU) is not None


def is_planned(tensor: Tensor) -> bool:
    """Whether there are GPU kernels for tensors of its dtype and device."""
    return tensor.dtype in _step.FUSED and devices.find(tensor.device) is not None


def has_kernel(parameter: Tensor) -> bool:
    """Whether the compiled op or a GPU kernel takes the parameter."""
    return _step.is_fused(parameter) or is_planned(parameter)


def change_count(state: object) -> int | None:
    """How often states were replaced; None where nobody counts."""
    return state.changes.count if type(state) is Table and state.is_counted else None


def counted(state: Any) -> Table:
    """`state` as a table whose changes are counted."""
    return state if type(state) is Table else Table(entries=state)
