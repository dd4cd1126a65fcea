"""The tensors of a step, as kernels and the reference take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..ops.optimizer_step import layout
from . import sharding

SCALES = "_scales"
"""What is added to the name of a state for that of the scales of its codes."""

IS_CPU = attrgetter("is_cpu")

_NONE = torch.empty(0, device="cpu")
FUSED = frozenset(layout.FLOATS)
"""Dtypes of parameters and gradients that kernels take."""


@dataclass
class Batch:
    """The tensors of a step and how they are to be treated; lists run in step.

    parameters: float32, bfloat16 or float16; dense, any strides; of sharded ones the shards.
    low_bits: int16 beside a split bfloat16 parameter, else an empty tensor; may be left empty.
    gradients: float32, bfloat16 or float16, with the strides of the parameter.
    states: one list per state of the rule: float32, bfloat16, float16, or 8-bit codes.
    scales: float32, one per 256 codes, else an empty tensor; may be left empty. Of a state that
        is kept as columns the rows (for the compiled op and the reference, their factors).
    steps: number of steps done so far, as tensors of one element; only for rules that need it.
    rng_streams: for each tensor the number of its stream of random numbers.
    wholes: the sharded parameters, by their place, of which the lists above hold the shards.
    has_copies: a gradient is a copy, in the parameter's strides, which the next step makes again.
    """

    parameters: list[Tensor] = field(default_factory=list)
    low_bits: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)
    scales: list[list[Tensor]] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    rng_streams: list[int] = field(default_factory=list)
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
        rng_stream: int,
        low_bits: Tensor | None,
    ) -> None:
        """Adds a parameter that has a gradient, with its states in the formats they are in.

        low_bits: of its master weight, of a sharded one those of the shard; None without one.
        """
        gradient = parameter.grad
        assert gradient is not None
        if sharding.is_sharded(parameter):
            self.wholes[len(self.parameters)] = parameter
            self.has_copies |= sharding.placements(gradient) != sharding.placements(parameter)
            rng_stream += sharding.shard_number(parameter) << sharding.STREAM_SHIFT
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
        self.rng_streams.append(rng_stream)
        self.low_bits.append(_NONE if low_bits is None else low_bits)
        for position, name in enumerate(names):
            self.states[position].append(state[name])
            self.scales[position].append(state.get(name + SCALES, _NONE))
        if "step" in state:
            self.steps.append(state["step"])

    def make_last_contiguous(self) -> list[tuple[Tensor, Tensor]]:
        """Puts copies in the place of the last parameter and its low bits if they are not so.

        Returns each tensor with its copy, whose values are the tensor's once the step is done.
        """
        if self.parameters[-1].is_contiguous():
            return []
        self.has_copies = True
        self.gradients[-1] = self.gradients[-1].contiguous()
        copies = []
        for tensors in (self.parameters, self.low_bits):
            if tensors[-1] is not _NONE:
                copies.append((tensors[-1], tensors[-1].contiguous()))
                tensors[-1] = copies[-1][1]
        return copies

    def bump_versions(self) -> None:
        """Notes for autograd and master weights that the parameters were written to."""
        written = [*self.parameters, *given(self.low_bits), *self.wholes.values()]
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
            low_bits=pick(self.low_bits),
            gradients=pick(self.gradients),
            states=[pick(state) for state in self.states],
            scales=[pick(scales) for scales in self.scales],
            steps=pick(self.steps),
            rng_streams=pick(self.rng_streams),
            wholes={new: self.wholes[old] for new, old in enumerate(places) if old in self.wholes},
            has_copies=self.has_copies,
        )


@dataclass(frozen=True)
class Scaling:
    """What every gradient is multiplied by, and when the step is left out.

    gradient_scale: gradients are divided by it.
    found_inf: the step is left out if it is not zero.
    factor: gradients are multiplied by it; -1 for maximize.
    clip_factor: and by it.
    """

    gradient_scale: Tensor | None = None
    found_inf: Tensor | None = None
    factor: float = 1.0
    clip_factor: Tensor | None = None

    @property
    def is_left_out(self) -> bool:
        """Whether the step is left out; waits for a GPU."""
        return self.found_inf is not None and bool(self.found_inf.item())

    @property
    def whole_factor(self) -> float:
        """Both factors as a number of the host."""
        return self.factor if self.clip_factor is None else self.factor * self.clip_factor.item()

    @property
    def gradient_factor(self) -> float:
        """All that gradients are multiplied by, as a number of the host."""
        factor = self.whole_factor
        return factor if self.gradient_scale is None else factor / self.gradient_scale.item()


def whole_parameters(batch: Batch) -> list[Tensor]:
    """The parameters of which the batch holds all or a shard."""
    return [batch.wholes.get(i, own) for i, own in enumerate(batch.parameters)]


def given(tensors: list[Tensor]) -> list[Tensor]:
    """The list, or an empty one if nobody has such a tensor: each that is passed takes time."""
    return tensors if any(tensor is not _NONE for tensor in tensors) else []


def reads_as_stored(tensor: Tensor) -> bool:
    """Whether the memory of a real tensor holds what it reads as: kernels get addresses."""
    return not (tensor._is_zerotensor() or tensor.is_neg())


def _aligned(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient in memory, with the strides of the parameter."""
    if reads_as_stored(gradient):
        if gradient.is_contiguous() and parameter.is_contiguous() and gradient.numel():
            return gradient
        if gradient.stride() == parameter.stride():
            return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def is_fused(parameter: Tensor) -> bool:
    """Whether the compiled op takes the parameter."""
    return parameter.is_cpu and parameter.dtype in FUSED
