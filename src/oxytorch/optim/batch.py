"""One step of a rule over many tensors: the compiled op, or the rule run on tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .. import _library
from . import sharding

LOW_HALF = "low_half"
SCALES = "_scales"
WHOLE, MEASURE, UPDATE = range(3)
"""Phases of a rule with a measure: both sweeps over the tensors, the first, or the second."""

SUMS = 2
"""How many sums a measure takes over each tensor."""

IS_CPU = attrgetter("is_cpu")

_NONE = torch.empty(0, device="cpu")
FUSED = frozenset((torch.float32, torch.bfloat16, torch.float16))


@dataclass
class Batch:
    """The tensors of a step and how they are to be treated; lists run in step.

    parameters: float32, bfloat16 or float16; dense, any strides; of sharded ones the shards.
    low_halves: int16 beside a split bfloat16 parameter, else an empty tensor; may be left empty.
    gradients: float32, bfloat16 or float16, with the strides of the parameter.
    states: one list per state of the rule: float32, bfloat16, float16, or 8-bit codes.
    scales: float32, one per 256 codes, else an empty tensor; may be left empty. Of a state that
        is kept as columns the rows (for the compiled op and the reference, their factors).
    steps: number of steps done so far, as tensors of one element; only for rules that need it.
    streams: for each tensor the number of its stream of random numbers.
    wholes: the sharded parameters, by their place, of which the lists above hold the shards.
    has_copies: a gradient is a copy, in the parameter's strides, which the next step makes anew.
    """

    parameters: list[Tensor] = field(default_factory=list)
    low_halves: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)
    scales: list[list[Tensor]] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    wholes: dict[int, Tensor] = field(default_factory=dict)
    has_copies: bool = False

    @classmethod
    def of(cls, names: Sequence[str]) -> Batch:
        """An empty batch for a rule that uses the states `names`."""
        return cls(states=[[] for _ in names], scales=[[] for _ in names])

    def add(
        self,
        parameter: Tensor,
        state: dict[str, Tensor],
        names: Sequence[str],
        stream: int,
        low: Tensor | None,
    ) -> None:
        """Adds a parameter that has a gradient, with its states in the formats they are in.

        low: its lower half, of a sharded one that of the shard; None where it is not split.
        """
        gradient = parameter.grad
        assert gradient is not None
        if sharding.is_sharded(parameter):
            self.wholes[len(self.parameters)] = parameter
            self.has_copies |= sharding.placements(gradient) != sharding.placements(parameter)
            stream += sharding.shard_number(parameter) << sharding.STREAM_SHIFT
            gradient = sharding.local_gradient(parameter, gradient)
            state = {
                key: sharding.local(value)
                for key, value in state.items()
                if isinstance(value, Tensor)
            }
            parameter = sharding.local(parameter)
        self.parameters.append(parameter)
        self.gradients.append(_aligned(gradient, parameter))
        self.has_copies |= self.gradients[-1] is not gradient
        self.streams.append(stream)
        self.low_halves.append(_NONE if low is None else low)
        for position, name in enumerate(names):
            self.states[position].append(state[name])
            self.scales[position].append(state.get(name + SCALES, _NONE))
        if "step" in state:
            self.steps.append(state["step"])

    def make_last_contiguous(self) -> list[tuple[Tensor, Tensor]]:
        """Puts copies in the place of the last parameter and its lower half if they are not so.

        Returns each tensor with its copy, whose values are the tensor's once the step is done.
        """
        if self.parameters[-1].is_contiguous():
            return []
        self.has_copies = True
        self.gradients[-1] = self.gradients[-1].contiguous()
        copies = []
        for tensors in (self.parameters, self.low_halves):
            if tensors[-1] is not _NONE:
                copies.append((tensors[-1], tensors[-1].contiguous()))
                tensors[-1] = copies[-1][1]
        return copies

    def bump_versions(self) -> None:
        """Tells autograd, and who keeps halves together, that the parameters were written to."""
        low_halves = _given(self.low_halves)
        written = [*self.parameters, *low_halves, *self.wholes.values()]
        torch.autograd.graph.increment_version(written)

    def by_device(self) -> list[Batch]:
        """The batch in parts, each of tensors on one device."""
        if all(map(IS_CPU, self.parameters)):
            return [self]
        places: dict[torch.device, list[int]] = {}
        for place, parameter in enumerate(self.parameters):
            places.setdefault(parameter.device, []).append(place)
        return [self] if len(places) == 1 else [self._part(own) for own in places.values()]

    def _part(self, places: Sequence[int]) -> Batch:
        def pick(values: list[Any]) -> list[Any]:
            return [values[place] for place in places] if values else []

        return Batch(
            parameters=pick(self.parameters),
            low_halves=pick(self.low_halves),
            gradients=pick(self.gradients),
            states=[pick(state) for state in self.states],
            scales=[pick(scales) for scales in self.scales],
            steps=pick(self.steps),
            streams=pick(self.streams),
            wholes={new: self.wholes[old] for new, old in enumerate(places) if old in self.wholes},
            has_copies=self.has_copies,
        )


@dataclass(frozen=True)
class Scaling:
    """What every gradient is multiplied by, and when the step is left out.

    gradient_scale: gradients are divided by it. found_inf: the step is left out if it is not zero.
    factor: gradients are multiplied by it; -1 for maximize. clip_factor: and by it.
    """

    gradient_scale: Tensor | None = None
    found_inf: Tensor | None = None
    factor: float = 1.0
    clip_factor: Tensor | None = None

    @property
    def whole_factor(self) -> float:
        """Both factors as a number of the host."""
        return self.factor if self.clip_factor is None else self.factor * self.clip_factor.item()


def run(
    rule: str,
    batch: Batch,
    hyper: Sequence[float],
    scaling: Scaling,
    stochastic: bool = False,
    seed: int = 0,
    sums: Tensor | None = None,
    phase: int = WHOLE,
) -> None:
    """Updates parameters, states and steps in place; checks everything before it writes.

    sums: float64 [number of parameters, SUMS], which the phase MEASURE fills with sums over the
    tensors of the batch and the phase UPDATE reads.
    """
    if not batch.parameters:
        return
    overload = getattr(torch.ops.oxytorch, f"{rule}_step").default
    with torch._C._AutoDispatchBelowAutograd():
        overload(
            batch.parameters,
            _given(batch.low_halves),
            batch.gradients,
            [tensor for state in batch.states for tensor in state],
            _given([tensor for state in batch.scales for tensor in state]),
            batch.steps,
            _on_host(scaling.gradient_scale),
            _on_host(scaling.found_inf),
            scaling.whole_factor,
            stochastic,
            seed,
            batch.streams,
            sums,
            phase,
            *hyper,
        )
    if phase != MEASURE:
        batch.bump_versions()


class Measured:
    """A step over shards whose first sweep is done and whose second waits for sums over all."""

    def __init__(self, run: Callable[..., None], wholes: Sequence[Tensor], sums: Tensor) -> None:
        """run: takes `sums` and `phase` as the function `run` does, all else is bound.

        wholes: the sharded or plain parameters. sums: float64 [len(wholes), SUMS].
        """
        self.sums = sums
        self.wholes = wholes
        self._run = run
        run(sums=sums, phase=MEASURE)

    def update(self) -> None:
        """The second sweep."""
        self._run(sums=self.sums, phase=UPDATE)


@torch.no_grad()
def finish(steps: Sequence[Measured]) -> None:
    """Combines the sums of all processes, all steps in one message, and ends the steps."""
    if not steps:
        return
    sums = torch.cat([step.sums for step in steps])
    sharding.add_shards_(sums, [whole for step in steps for whole in step.wholes])
    parts = torch.split(sums, [len(step.sums) for step in steps])
    for step, part in zip(steps, parts, strict=True):
        step.sums.copy_(part)
        step.update()


def whole_parameters(batch: Batch) -> list[Tensor]:
    """The parameters of which the batch holds all or a shard."""
    return [batch.wholes.get(i, own) for i, own in enumerate(batch.parameters)]


def empty_sums(batch: Batch) -> Tensor:
    """Sums of a measure, zeros."""
    parameters = batch.parameters
    return torch.zeros(len(parameters), SUMS, dtype=torch.float64, device=parameters[0].device)


def _on_host(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None else tensor.cpu()


def _given(tensors: list[Tensor]) -> list[Tensor]:
    """The list, or an empty one if nobody has such a tensor: each that is passed takes time."""
    return tensors if any(tensor is not _NONE for tensor in tensors) else []


def _aligned(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient with the strides of the parameter."""
    if gradient.is_contiguous() and parameter.is_contiguous():
        return gradient
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def step_dtype() -> torch.dtype:
    """The dtype that torch gives to the number of steps."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


@functools.cache
def is_compiled(rule: str) -> bool:
    """Whether the library is loaded and has the rule."""
    return _library.loaded and hasattr(torch.ops.oxytorch, f"{rule}_step")


def is_fused(parameter: Tensor) -> bool:
    """Whether the compiled op takes the parameter."""
    return parameter.is_cpu and parameter.dtype in FUSED


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory without holes, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
