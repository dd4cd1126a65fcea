"""Steps of groups on GPUs: planned once, repeated as long as nothing has moved."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...ops.optimizer_step.layout import WHOLE
from .. import sharding
from ..batch import FUSED, IS_CPU, Batch, Scaling, is_fused, whole_parameters
from ..master_weight import MasterWeight
from ..state_table import StateTable
from . import address_guard, devices
from .address_guard import Moved

if TYPE_CHECKING:
    from .launch_plan import LaunchPlan

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class CachedLaunch:
    """A plan, and what it takes to run it again.

    flags: hyper-parameters of the call beyond those of the group.
    wholes: the parameters, or those whose shards they are, in the plan's order.
    """

    plan: LaunchPlan
    flags: tuple[bool, ...]
    wholes: list[Tensor]

    @property
    def needs_sums_of_shards(self) -> bool:
        """Whether the update needs norms of sharded parameters."""
        return len(self.plan.sums) > 0 and any(map(sharding.is_sharded, self.wholes))

    def fits(self, hyper: Sequence[Any]) -> bool:
        """Whether the kernels are those for the group's hyper-parameters."""
        return self.plan.fits((*hyper, *self.flags))

    def run(
        self,
        hyper: Sequence[Any],
        scaling: Scaling,
        sums: Tensor | None = None,
        phase: int = WHOLE,
    ) -> None:
        """Launches the step, or one sweep of it with the plan's own sums."""
        assert sums is None or sums is self.plan.sums
        self.plan.run((*hyper, *self.flags), scaling, phase)


class StepCache:
    """The launches of a group's step, and all that has to stay for them to be its next one."""

    def __init__(
        self,
        launches: Sequence[CachedLaunch],
        state: StateTable,
        parameters: Sequence[Tensor],
        rng_stream: int,
        settings: Hashable,
        master_weight: Callable[[Tensor], MasterWeight | None],
    ) -> None:
        """parameters: all of the group.
        rng_stream: of the first of them.
        settings: all but hyper-parameters that decides how the step is done.
        """
        self._state = state
        self._changes = state.changes.count
        self._parameters = list(parameters)
        self._rng_stream = rng_stream
        self._settings = settings
        planned = {id(whole) for launch in launches for whole in launch.wholes}
        rest = [own for own in parameters if id(own) not in planned]
        self._launches = []
        for launch in launches:
            weights = [master_weight(own) for own in launch.wholes]
            guard = address_guard.guard(
                [*launch.wholes, *_states_of(state, launch.wholes)],
                launch.wholes,
                launch.plan.addresses,
                weights,
            )
            self._launches.append((guard, launch))
        # They may get a gradient, or lose an empty one.
        addresses = torch.zeros(
            sum(own.grad is not None for own in rest), 1, dtype=torch.int64, device="cpu"
        )
        self._rest = address_guard.guard([], rest, addresses) if rest else None

    def settle(self, before: int, now: int) -> None:
        """Notes that no change of states from number `before` to `now` belongs to this group."""
        if self._changes == before:
            self._changes = now

    def is_current(
        self,
        state: object,
        parameters: Sequence[Tensor],
        rng_stream: int,
        settings: Hashable,
        hyper: Sequence[Any],
    ) -> bool:
        """Whether the launches are the step of the group as it is now, wherever gradients lie."""
        if (
            self._state is not state
            or not self._state.is_counted
            or self._changes != self._state.changes.count
            or self._rng_stream != rng_stream
            or len(parameters) != len(self._parameters)
            or not all(map(is_, parameters, self._parameters))
            or self._settings != settings
        ):
            return False
        if self._rest is not None and self._rest.compare() is Moved.OTHER:
            return False
        for guard, launch in self._launches:
            moved = guard.compare()
            if moved is Moved.OTHER or not launch.fits(hyper):
                return False
            if moved is Moved.GRADIENTS:
                launch.plan.table.changed()
        return True

    def run(self, launch: Callable[[CachedLaunch], None]) -> None:
        """Launches the step by `launch`."""
        for guard, own in self._launches:
            launch(own)
            guard.bump_versions()


def _states_of(state: StateTable, parameters: Sequence[Tensor]) -> list[Tensor]:
    values = (value for own in parameters for value in state[own].values())
    return [value for value in values if isinstance(value, Tensor)]


def load(parameters: Sequence[Tensor]) -> None:
    """Imports what steps over the parameters need, so that the first one need not wait for it."""
    # Programs that stay on the processor do without.
    if any(devices.find(device) for device in {own.device for own in parameters}):
        from . import launch_plan  # noqa: F401


def plan(
    rule: str,
    batch: Batch,
    hyper: Sequence[Any],
    flags: tuple[bool, ...],
    is_random: bool,
    seed: int,
) -> CachedLaunch | None:
    """A plan for the batch, which is on one device; None where that has no kernels for it."""
    device = devices.find(batch.parameters[0].device)
    if device is None or not all(map(is_planned, batch.parameters)):
        return None
    from ...gpu.errors import NoKernelError
    from .launch_plan import LaunchPlan

    try:
        made = LaunchPlan(rule, batch, (*hyper, *flags), is_random, seed, device)
    except NoKernelError as error:
        if error.forced:
            raise
        devices.give_up(device.device, str(error))
        return None
    wholes = whole_parameters(batch)
    return CachedLaunch(made, flags, [wholes[place] for place in made.order])


def may_plan(parameters: Sequence[Tensor]) -> bool:
    """False if there is certainly no GPU kernel for any of the parameters."""
    return not all(map(IS_CPU, parameters)) or devices.find(_CPU) is not None


def is_planned(tensor: Tensor) -> bool:
    """Whether there are GPU kernels for tensors of its dtype and device."""
    return tensor.dtype in FUSED and devices.find(tensor.device) is not None


def has_kernel(parameter: Tensor) -> bool:
    """Whether the compiled op or a GPU kernel takes the parameter."""
    return is_fused(parameter) or is_planned(parameter)
