"""A step of a rule on a GPU, made once for the tensors of a batch and launched again and again.

The tables of ops/optimizer_step/layout.py lie on the device and hold addresses, so that a step is a
few launches that pass addresses of tables. Whoever keeps a plan sees to it that the tensors are
still where they were (address_guard.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...gpu.kernel import Kernel, Launch, Signature
from ...ops.mean_squares import gpu as mean_squares
from ...ops.mean_squares import tiling
from ...ops.optimizer_step import gpu, layout
from ...ops.optimizer_step.layout import REDUCE_NORMS, SUMS, UPDATE, WHOLE, Format
from ...ops.optimizer_step.reference import constants_of, has_norms
from ..batch import Batch, Scaling
from .device_table import DeviceTable
from .devices import StepDevice
from .tensor_table import Factored, formats_of, tables_of

Hyper = Sequence[Any]
"""Numbers and flags in the order of `<rule>_constants`; the learning rate may be a tensor."""


@dataclass(frozen=True)
class _Tables:
    """What the kernels read and write beside `tensors`; see layout.py."""

    blocks: Tensor
    scalars: Tensor
    keys: Tensor
    partials: Tensor
    sums: Tensor


class LaunchPlan:
    """One step of `rule` over the tensors of `batch`, which are on one device.

    order: the places in the batch of the tensors in the order of the plan's tables.
    addresses: int64 [tensors, ...] on the host, the first number of a row that of a gradient; tell
    `table` when they were written.
    sums: float64 [tensors, SUMS], on the device, of a rule with norms, in that order.
    """

    def __init__(
        self, rule: str, batch: Batch, hyper: Hyper, stochastic: bool, seed: int, device: StepDevice
    ) -> None:
        self.rule = rule
        self._device = device
        self._flags = flags_of(rule, hyper)
        self._hyper = hyper
        formats = [formats_of(rule, batch, i, stochastic) for i in range(len(batch.parameters))]
        self.order = sorted(range(len(formats)), key=formats.__getitem__)
        host, self._sections, blocks = tables_of(batch, formats, self.order)
        self.addresses = host[:, layout.GRADIENT :]
        count = len(self.order)
        place = device.device
        with_norms = has_norms(rule)
        shapes = [batch.parameters[i].shape for i in self.order]
        self._room = Factored(host, shapes, place) if Format.FACTORED in formats[0] else None
        self._tables = _Tables(
            torch.empty_like(blocks, device=place),
            torch.empty(count, layout.SCALAR_FIELDS, device=place),
            torch.empty(count, layout.KEY_FIELDS, dtype=torch.int32, device=place),
            torch.empty(len(blocks) if with_norms else 0, SUMS, dtype=torch.float64, device=place),
            torch.empty(count if with_norms else 0, SUMS, dtype=torch.float64, device=place),
        )
        self.table = DeviceTable(device, host)
        self.sums = self._tables.sums
        self._seed = (seed + 2**63) % 2**64 - 2**63
        self._prepare_step: Launch
        self._factors: list[tuple[Launch, int]] = []
        self._first: list[tuple[Launch, int]] = []
        self._trust_ratio: Launch | None = None
        self._second: list[tuple[Launch, int]] = []
        # Loads the kernels, so that what is missing is known before anything is written.
        self._bind(hyper)
        if self._room is not None:
            self._bind_factors(self._room, shapes, hyper)
        self._arguments: list[Any] = []
        self._found_inf = 0
        self._phase = WHOLE
        self._tensors = 0
        self._memory = list(vars(self._tables).values())
        device.upload(self._tables.blocks, blocks, device.staging(blocks))

    def fits(self, hyper: Hyper) -> bool:
        """Whether the kernels are those for these hyper-parameters."""
        if hyper[1:] == self._hyper[1:]:
            return True
        is_same = flags_of(self.rule, hyper) == self._flags
        self._hyper = hyper if is_same else self._hyper
        return is_same

    def run(self, hyper: Hyper, scaling: Scaling, phase: int = WHOLE) -> None:
        """Launches the step, or for a rule with norms one of its phases.

        hyper: such that the plan fits.
        """
        stream = self._device.stream()
        self._point_at(self.table.bring(stream, self._memory))
        kept = self._set(hyper, scaling, phase)
        if phase != UPDATE:
            self._prepare_step(gpu.programs_of_prepare_step(len(self.order)), stream)
            for launch, count in self._factors:
                launch(count, stream)
            for launch, count in self._first:
                launch(gpu.programs_of_step(count), stream)
        if self._trust_ratio is not None:
            self._trust_ratio(len(self.order), stream)
        if phase != REDUCE_NORMS:
            for launch, count in self._second:
                launch(gpu.programs_of_step(count), stream)
        # Until here nothing may take the memory of what was made for the launches.
        del kept

    def _point_at(self, tensors: Tensor) -> None:
        address = tensors.data_ptr()
        if address != self._tensors:
            self._tensors = address
            for launch in self._launches():
                launch.set(0, address)

    def _launches(self) -> list[Launch]:
        others = [] if self._trust_ratio is None else [self._trust_ratio]
        counted = (*self._factors, *self._first, *self._second)
        return [self._prepare_step, *others, *(launch for launch, _ in counted)]

    def _bind(self, hyper: Hyper) -> None:
        tables, function = self._tables, self._device.function
        tensors, scalars = 0, tables.scalars.data_ptr()
        keys, sums = tables.keys.data_ptr(), tables.sums.data_ptr()
        family = gpu.family_signature(self.rule)
        numbers = _numbers(hyper)
        own = (tensors, scalars, keys, len(self.order))
        self._prepare_step = function(gpu.PREPARE_STEP, family).bind(
            *own, 0, 0, 0, 0, self._seed, 1.0, *numbers
        )
        kernels = [(gpu.UPDATE, "update", self._second)]
        if len(tables.sums):
            kernels.append((gpu.REDUCE_NORMS, "reduce_norms", self._first))
            self._trust_ratio = function(gpu.TRUST_RATIO, family).bind(
                tensors, tables.partials.data_ptr(), sums, scalars, 0, WHOLE, *numbers
            )
        for kernel, name, launches in kernels:
            flags = gpu.run_time_flags(name, self.rule, self._flags)
            for section in filter(lambda own: own.count > 0, self._sections):
                signature = gpu.step_signature(name, self.rule, self._flags, section.formats)
                launch = function(kernel, signature).bind(
                    tensors,
                    tables.blocks[section.first :].data_ptr(),
                    section.count,
                    scalars,
                    keys,
                    tables.partials[section.first :].data_ptr() if len(tables.sums) else 0,
                    0,
                    flags,
                    layout.formats_word(section.formats),
                )
                launches.append((launch, section.count))

    def _bind_factors(self, room: Factored, shapes: Sequence[Sequence[int]], hyper: Hyper) -> None:
        """What moves Adafactor's rows and columns before the sweeps."""
        tables, function = self._tables, self._device.function
        tensors, scalars = 0, tables.scalars.data_ptr()
        kernels: list[tuple[Kernel, Signature, Tensor, list[float]]] = []
        for section in self._sections:
            tiles = tiling.sum_tiles(shapes[section.tensors])
            tiles[:, 0] += section.tensors.start
            signature = mean_squares.sums_signature(section.formats[1])
            kernels.append((mean_squares.SUMS, signature, tiles, []))
        tiles, signature = tiling.factor_tiles(shapes), mean_squares.FACTORS_SIGNATURE
        kernels.append((mean_squares.FACTORS, signature, tiles, [_least(hyper)]))
        for kernel, signature, tiles, more in kernels:
            own = torch.empty_like(tiles, device=self._device.device)
            self._device.upload(own, tiles, self._device.staging(tiles))
            room.tiles.append(own)
            launch = function(kernel, signature).bind(tensors, own.data_ptr(), scalars, 0, *more)
            self._factors.append((launch, len(tiles)))

    def _set(self, hyper: Hyper, scaling: Scaling, phase: int) -> list[Tensor]:
        """Sets the arguments that change; returns tensors that the launches read."""
        kept: list[Tensor] = []

        def address(tensor: Tensor | None) -> int:
            if tensor is None:
                return 0
            if tensor.device != self._device.device or tensor.dtype != torch.float32:
                tensor = tensor.to(self._device.device, torch.float32, non_blocking=True)
            kept.append(tensor)
            return tensor.data_ptr()

        rate = hyper[0] if isinstance(hyper[0], Tensor) else None
        found_inf = address(scaling.found_inf)
        scales = (address(scaling.gradient_scale), address(scaling.clip_factor), address(rate))
        numbers = _numbers(hyper)
        arguments = [found_inf, *scales, self._seed, scaling.factor, *numbers]
        if arguments != self._arguments:
            _set_from(self._prepare_step, 4, arguments, self._arguments)
            if self._trust_ratio is not None:
                _set_from(self._trust_ratio, 6, numbers, self._arguments[6:])
            if self._factors:
                self._factors[-1][0].set(4, _least(hyper))
            self._arguments = arguments
        if found_inf != self._found_inf:
            self._found_inf = found_inf
            if self._trust_ratio is not None:
                self._trust_ratio.set(4, found_inf)
            for launch, _ in self._first + self._second:
                launch.set(6, found_inf)
            for launch, _ in self._factors:
                launch.set(3, found_inf)
        if self._trust_ratio is not None and phase != self._phase:
            self._phase = phase
            self._trust_ratio.set(5, phase)
        return kept


def _least(hyper: Hyper) -> float:
    """The least mean of rows: eps1 of `adafactor_constants`."""
    return float(hyper[2])


def _set_from(launch: Launch, first: int, values: Sequence[float], before: Sequence[float]) -> None:
    """Sets the arguments from number `first` on that are not as before."""
    for position, value in enumerate(values):
        if position >= len(before) or value != before[position]:
            launch.set(first + position, value)


def _numbers(hyper: Hyper) -> list[float]:
    """The hyper-parameters as a kernel takes them."""
    numbers = [0.0 if isinstance(value, Tensor) else float(value) for value in hyper]
    return [*numbers, *[0.0] * (layout.HYPER - len(numbers))]


def flags_of(rule: str, hyper: Hyper) -> dict[str, bool]:
    """The settings of the rule's flags; they do not depend on the learning rate."""
    numbers = [0.0 if isinstance(value, Tensor) else value for value in hyper]
    values = constants_of(rule, numbers)
    return {name: value for name, value in values.items() if isinstance(value, bool)}
