"""A step of a rule on a GPU, made once for the tensors of a batch and launched again and again.

The tables of ops/optimizer_step/layout.py lie on the device and hold addresses, so that a step is a
few launches that pass addresses of tables. Whoever keeps a plan sees to it that the tensors are
still where they were (_watch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..gpu.kernel import Launch
from ..ops.optimizer_step import gpu, layout, rule_text
from ..ops.optimizer_step.layout import Format
from . import rules
from ._devices import Device
from ._step import MEASURE, SUMS, UPDATE, WHOLE, Batch, Scaling

Hyper = Sequence[Any]
"""Numbers and flags in the order of `<rule>_constants`; the learning rate may be a tensor."""

GRADIENT = 2
"""Where in a row of `tensors` the address of the gradient stands."""

_FLOATS = {
    torch.float32: Format.FLOAT32,
    torch.bfloat16: Format.BFLOAT16,
    torch.float16: Format.FLOAT16,
}
_CODES = {torch.int8: Format.SIGNED_CODES, torch.uint8: Format.UNSIGNED_CODES}


@dataclass(frozen=True)
class _Section:
    """Tensors in the same formats, which one launch treats: blocks [first, first + count)."""

    formats: tuple[Format, ...]
    first: int
    count: int


@dataclass(frozen=True)
class _Tables:
    """What the kernels read and write; see layout.py."""

    tensors: Tensor
    blocks: Tensor
    scalars: Tensor
    keys: Tensor
    partials: Tensor
    sums: Tensor


class Plan:
    """One step of `rule` over the tensors of `batch`, which are on one device.

    order: the places in the batch of the tensors in the order of the plan's tables.
    sums: float64 [tensors, SUMS], on the device, of a rule with a measure, in that order.
    """

    def __init__(
        self, rule: str, batch: Batch, hyper: Hyper, stochastic: bool, seed: int, device: Device
    ) -> None:
        self.rule = rule
        self._device = device
        self._flags = flags_of(rule, hyper)
        formats = [_formats(rule, batch, i, stochastic) for i in range(len(batch.parameters))]
        self.order = sorted(range(len(formats)), key=formats.__getitem__)
        self._host, self._sections, blocks = _tables(batch, formats, self.order)
        self.addresses = self._host[:, GRADIENT:]
        count = len(self.order)
        place = device.device
        measures = rule_text.families()[rule].measure is not None
        self._tables = _Tables(
            torch.empty_like(self._host, device=place),
            torch.empty_like(blocks, device=place),
            torch.empty(count, layout.SCALAR_FIELDS, device=place),
            torch.empty(count, layout.KEY_FIELDS, dtype=torch.int32, device=place),
            torch.empty(len(blocks) if measures else 0, SUMS, dtype=torch.float64, device=place),
            torch.empty(count if measures else 0, SUMS, dtype=torch.float64, device=place),
        )
        self.sums = self._tables.sums
        self._seed = (seed + 2**63) % 2**64 - 2**63
        self._prepare: Launch
        self._first: list[tuple[Launch, int]] = []
        self._trust: Launch | None = None
        self._second: list[tuple[Launch, int]] = []
        # Loads the kernels, so that what is missing is known before anything is written.
        self._bind(hyper)
        self._arguments: list[Any] = []
        self._found_inf = 0
        self._phase = WHOLE
        self._tensors = self._tables.tensors.data_ptr()
        self._streams = {device.stream()}
        # Of graphs that were captured: they copy the one into the other whenever they run.
        self._captured: list[tuple[Tensor, Tensor]] = []
        self._is_current = False
        device.upload(self._tables.blocks, blocks, device.staging(blocks))
        self._staging: Tensor | None = None

    @property
    def is_captured(self) -> bool:
        """Whether a graph uses the plan's memory, which has to stay then."""
        return bool(self._captured)

    def fits(self, hyper: Hyper) -> bool:
        """Whether the kernels are those for these hyper-parameters."""
        return flags_of(self.rule, hyper) == self._flags

    def moved(self) -> None:
        """Tells that `addresses` were changed."""
        self._is_current = False

    def run(self, hyper: Hyper, scaling: Scaling, phase: int = WHOLE) -> None:
        """Launches the step, or for a rule with a measure one of its phases.

        hyper: such that the plan fits.
        """
        stream = self._device.stream()
        if self._device.is_capturing():
            self._point_at(self._upload_in_graph())
        else:
            self._use_on(stream)
            self._bring()
        kept = self._set(hyper, scaling, phase)
        if phase != UPDATE:
            self._prepare(gpu.programs_of_prepare(len(self.order)), stream)
            for launch, count in self._first:
                launch(gpu.programs_of_step(count), stream)
        if self._trust is not None:
            self._trust(len(self.order), stream)
        if phase != MEASURE:
            for launch, count in self._second:
                launch(gpu.programs_of_step(count), stream)
        # Until here nothing may take the memory of what was made for the launches.
        del kept

    # Tables

    def _bring(self) -> None:
        """Has the table of addresses on the device, as it is on the host."""
        self._point_at(self._tables.tensors)
        if not self._is_current:
            self._device.upload(self._tables.tensors, self._host, self._device.staging(self._host))
            self._is_current = True
        if self._staging is None:
            # Memory of the host cannot be had while a graph is captured.
            self._staging = self._device.staging(self._host)

    def _upload_in_graph(self) -> Tensor:
        """A table of its own for the graph that is being captured, which later steps leave."""
        if self._staging is None:
            raise RuntimeError(
                f"{self.rule}: expected a step outside of the graph before each that is captured; "
                "make one more step before capturing"
            )
        staging, self._staging = self._staging, None
        table = torch.empty_like(self._tables.tensors)
        self._device.upload(table, self._host, staging)
        self._captured.append((table, staging))
        return table

    def _use_on(self, stream: int) -> None:
        """Keeps the tables' memory, should the plan be given up, until the stream is done."""
        if stream not in self._streams:
            self._streams.add(stream)
            self._device.use_on_stream(list(vars(self._tables).values()))

    def _point_at(self, tensors: Tensor) -> None:
        address = tensors.data_ptr()
        if address != self._tensors:
            self._tensors = address
            for launch in self._launches():
                launch.set(0, address)

    # Launches

    def _launches(self) -> list[Launch]:
        others = [] if self._trust is None else [self._trust]
        return [self._prepare, *others, *(launch for launch, _ in self._first + self._second)]

    def _bind(self, hyper: Hyper) -> None:
        tables, function = self._tables, self._device.function
        tensors, scalars = tables.tensors.data_ptr(), tables.scalars.data_ptr()
        keys, sums = tables.keys.data_ptr(), tables.sums.data_ptr()
        family = gpu.family_signature(self.rule)
        numbers = _numbers(hyper)
        own = (tensors, scalars, keys, len(self.order))
        self._prepare = function(gpu.PREPARE, family).bind(
            *own, 0, 0, 0, 0, self._seed, 1.0, *numbers
        )
        kernels = [(gpu.UPDATE, "update", self._second)]
        if len(tables.sums):
            kernels.append((gpu.MEASURE, "measure", self._first))
            self._trust = function(gpu.TRUST, family).bind(
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
            _set_from(self._prepare, 4, arguments, self._arguments)
            if self._trust is not None:
                _set_from(self._trust, 6, numbers, self._arguments[6:])
            self._arguments = arguments
        if found_inf != self._found_inf:
            self._found_inf = found_inf
            if self._trust is not None:
                self._trust.set(4, found_inf)
            for launch, _ in self._first + self._second:
                launch.set(6, found_inf)
        if self._trust is not None and phase != self._phase:
            self._phase = phase
            self._trust.set(5, phase)
        return kept


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
    constants: Callable[..., dict[str, Any]] = getattr(rules, f"{rule}_constants")
    numbers = [0.0 if isinstance(value, Tensor) else value for value in hyper]
    first = [1.0] if rule_text.families()[rule].has_step else []
    values = constants(*first, *numbers)
    return {name: value for name, value in values.items() if isinstance(value, bool)}


def _formats(rule: str, batch: Batch, index: int, stochastic: bool) -> tuple[Format, ...]:
    """How the operands of a tensor are kept; refuses those that kernels cannot treat."""
    parameter, gradient = batch.parameters[index], batch.gradients[index]
    _check_dense(rule, parameter)
    _check_like(rule, "gradients", gradient, parameter)
    low = batch.low_halves[index]
    own = _float_format(rule, "parameters", parameter)
    if low.numel():
        _check_like(rule, "low_halves", low, parameter)
        if parameter.dtype != torch.bfloat16 or low.dtype != torch.int16:
            raise _refusal(
                rule,
                "parameters",
                "halves of dtype bfloat16 and int16",
                f"{parameter.dtype} and {low.dtype}",
            )
        own = Format.SPLIT
    found = [own, _float_format(rule, "gradients", gradient)]
    for states, scales in zip(batch.states, batch.scales, strict=True):
        state, extra = states[index], scales[index]
        if state.dtype in _CODES:
            _check_like(rule, "states", state, parameter)
            blocks = -(-parameter.numel() // layout.CODE_BLOCK)
            if extra.shape != (blocks,) or extra.dtype != torch.float32:
                raise _refusal(rule, "scales", f"float32 of shape [{blocks}]", list(extra.shape))
            found.append(_CODES[state.dtype])
        elif extra.numel():
            found.append(Format.FACTORED)
        else:
            _check_like(rule, "states", state, parameter)
            own = _float_format(rule, "states", state)
            is_random = stochastic and own is Format.BFLOAT16
            found.append(Format.STOCHASTIC if is_random else own)
    return tuple(found)


def _tables(
    batch: Batch, formats: Sequence[tuple[Format, ...]], order: Sequence[int]
) -> tuple[Tensor, list[_Section], Tensor]:
    """`tensors`, the sections, and `blocks`; each section begins at an even block."""
    rows, sections, blocks, first_block = [], [], [], 0
    begin = 0
    while begin < len(order):
        own = formats[order[begin]]
        end = begin
        while end < len(order) and formats[order[end]] == own:
            end += 1
        members = order[begin:end]
        counts = torch.tensor([batch.parameters[i].numel() for i in members])
        table = layout.block_table(counts)
        table[:, 0] += begin
        sections.append(_Section(own, first_block, len(table)))
        starts = torch.cumsum(layout.block_counts(counts), 0) - layout.block_counts(counts)
        rows += [
            _row(batch, i, first_block + start)
            for i, start in zip(members, starts.tolist(), strict=True)
        ]
        blocks.append(torch.nn.functional.pad(table, (0, 0, 0, len(table) % 2)))
        first_block += len(blocks[-1])
        begin = end
    return torch.tensor(rows), sections, torch.cat(blocks).contiguous()


def _row(batch: Batch, index: int, first_block: int) -> list[int]:
    """A row of `tensors`."""
    parameter, low = batch.parameters[index], batch.low_halves[index]
    operands = [
        (parameter, low),
        (batch.gradients[index], None),
        *((s[index], e[index]) for s, e in zip(batch.states, batch.scales, strict=True)),
    ]
    row = [0] * layout.TENSOR_FIELDS
    for position, (data, extra) in enumerate(operands):
        row[2 * position] = data.data_ptr()
        if extra is not None and extra.numel():
            row[2 * position + 1] = extra.data_ptr()
            if extra.dtype == torch.float32 and data.dtype == torch.float32:
                row[layout.HEIGHT], row[layout.WIDTH] = parameter.shape[-2:]
    row[layout.STEP] = batch.steps[index].data_ptr() if batch.steps else 0
    row[layout.COUNT] = parameter.numel()
    row[layout.STREAM] = batch.streams[index]
    row[layout.FIRST_BLOCK] = first_block
    return row


def _refusal(rule: str, argument: str, wanted: str, found: object) -> RuntimeError:
    return RuntimeError(f"{rule}_step: expected {argument} {wanted}, got {found}")


def _float_format(rule: str, argument: str, tensor: Tensor) -> Format:
    if tensor.dtype not in _FLOATS:
        wanted = "of dtype float32, bfloat16 or float16"
        raise _refusal(rule, argument, wanted, tensor.dtype)
    return _FLOATS[tensor.dtype]


def _check_dense(rule: str, parameter: Tensor) -> None:
    if not parameter.is_contiguous():
        expected = 1
        for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
            if size != 1:
                if stride != expected:
                    raise _refusal(
                        rule,
                        "parameters",
                        "without holes between their elements",
                        f"strides {list(parameter.stride())}",
                    )
                expected *= size


def _check_like(rule: str, argument: str, tensor: Tensor, like: Tensor) -> None:
    """Refuses a tensor whose elements do not lie where those of the parameter do."""
    if tensor.device != like.device:
        raise _refusal(rule, argument, f"on {like.device}", tensor.device)
    if tensor.shape != like.shape:
        raise _refusal(rule, argument, f"of shape {list(like.shape)}", list(tensor.shape))
    if tensor.stride() != like.stride() and any(
        own != wanted
        for own, wanted, size in zip(tensor.stride(), like.stride(), like.shape, strict=True)
        if size > 1
    ):
        wanted = f"with the parameter's strides {list(like.stride())}"
        raise _refusal(rule, argument, wanted, list(tensor.stride()))
