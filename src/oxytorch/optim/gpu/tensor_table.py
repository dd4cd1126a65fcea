"""The tables of ops/optimizer_step/layout.py for the tensors of a batch, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.tensor_forms import is_dense
from ...ops.mean_squares import tiling
from ...ops.optimizer_step import layout
from ...ops.optimizer_step.layout import Format
from ..batch import Batch

_CODES = {torch.int8: Format.SIGNED_CODES, torch.uint8: Format.UNSIGNED_CODES}


@dataclass(frozen=True)
class Section:
    """Tensors in the same formats, which one launch treats: blocks [first, first + count)."""

    formats: tuple[Format, ...]
    tensors: slice
    first: int
    count: int


def formats_of(rule: str, batch: Batch, index: int, stochastic: bool) -> tuple[Format, ...]:
    """How the operands of a tensor are kept; refuses those that kernels cannot treat."""
    parameter, gradient = batch.parameters[index], batch.gradients[index]
    _check_dense(rule, parameter)
    _check_like(rule, "gradients", gradient, parameter)
    low_bits = batch.low_bits[index]
    own = _float_format(rule, "parameters", parameter)
    if low_bits.numel():
        _check_like(rule, "low_bits", low_bits, parameter)
        if parameter.dtype != torch.bfloat16 or low_bits.dtype != torch.int16:
            raise _refusal(
                rule,
                "parameters",
                "of dtype bfloat16 beside low bits of dtype int16",
                f"{parameter.dtype} and {low_bits.dtype}",
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
            _check_factors(rule, state, extra, parameter)
            found.append(Format.FACTORED)
        else:
            _check_like(rule, "states", state, parameter)
            own = _float_format(rule, "states", state)
            is_random = stochastic and own is Format.BFLOAT16
            found.append(Format.STOCHASTIC if is_random else own)
    return tuple(found)


def tables_of(
    batch: Batch, formats: Sequence[tuple[Format, ...]], order: Sequence[int]
) -> tuple[Tensor, list[Section], Tensor]:
    """`tensors`, the sections, and `blocks`; each section begins at an even block."""
    rows, sections, blocks, first_block = [], [], [], 0
    begin = 0
    while begin < len(order):
        own = formats[order[begin]]
        end = begin
        while end < len(order) and formats[order[end]] == own:
            end += 1
        members = order[begin:end]
        counts = torch.tensor([batch.parameters[i].numel() for i in members], device="cpu")
        table = layout.block_table(counts)
        table[:, 0] += begin
        sections.append(Section(own, slice(begin, end), first_block, len(table)))
        starts = torch.cumsum(layout.block_counts(counts), 0) - layout.block_counts(counts)
        rows += [
            _row(batch, i, first_block + start)
            for i, start in zip(members, starts.tolist(), strict=True)
        ]
        blocks.append(torch.nn.functional.pad(table, (0, 0, 0, len(table) % 2)))
        first_block += len(blocks[-1])
        begin = end
    return torch.tensor(rows, device="cpu"), sections, torch.cat(blocks).contiguous()


class Factored:
    """Memory to work in, for a plan whose states are kept as rows and columns.

    tiles: tables that its launches read.
    """

    def __init__(self, rows: Tensor, shapes: Sequence[torch.Size], place: torch.device) -> None:
        """rows: `tensors`, which learn where their part lies."""
        factors = [shape.numel() // shape[-1] for shape in shapes]
        strips = [tiling.strip_count(shape) * shape[-1] for shape in shapes]
        self.factors = torch.empty(sum(factors), device=place)
        self.strips = torch.empty(sum(strips), device=place)
        self.tiles: list[Tensor] = []
        at, strip = self.factors.data_ptr(), self.strips.data_ptr()
        for row, shape, own, own_strips in zip(rows, shapes, factors, strips, strict=True):
            # Until now the rows that are kept stood as the extra of the state.
            row[layout.ROWS] = row[layout.ROW_FACTORS].item()
            row[layout.ROW_FACTORS], row[layout.STRIPS] = at, strip
            row[layout.HEIGHT], row[layout.WIDTH] = shape[-2:]
            at, strip = at + 4 * own, strip + 4 * own_strips


def _row(batch: Batch, index: int, first_block: int) -> list[int]:
    """A row of `tensors`."""
    parameter, low_bits = batch.parameters[index], batch.low_bits[index]
    operands = [
        (parameter, low_bits),
        (batch.gradients[index], None),
        *((s[index], e[index]) for s, e in zip(batch.states, batch.scales, strict=True)),
    ]
    row = [0] * layout.TENSOR_FIELDS
    for position, (data, extra) in enumerate(operands):
        row[2 * position] = data.data_ptr()
        if extra is not None and extra.numel():
            row[2 * position + 1] = extra.data_ptr()
    row[layout.STEP] = batch.steps[index].data_ptr() if batch.steps else 0
    row[layout.COUNT] = parameter.numel()
    row[layout.RNG_STREAM] = batch.rng_streams[index]
    row[layout.FIRST_BLOCK] = first_block
    return row


def _refusal(rule: str, argument: str, wanted: str, found: object) -> RuntimeError:
    return RuntimeError(f"{rule}_step: expected {argument} {wanted}, got {found}")


def _float_format(rule: str, argument: str, tensor: Tensor) -> Format:
    if tensor.dtype not in layout.FLOATS:
        wanted = "of dtype float32, bfloat16 or float16"
        raise _refusal(rule, argument, wanted, tensor.dtype)
    return layout.FLOATS[tensor.dtype]


def _check_dense(rule: str, parameter: Tensor) -> None:
    if not is_dense(parameter):
        wanted = "without holes between their elements"
        raise _refusal(rule, "parameters", wanted, f"strides {list(parameter.stride())}")


def _check_factors(rule: str, columns: Tensor, rows: Tensor, like: Tensor) -> None:
    """Refuses factors that are not those of a contiguous parameter."""
    if not like.is_contiguous():
        wanted = "contiguous beside factored states"
        raise _refusal(rule, "parameters", wanted, f"strides {list(like.stride())}")
    for factor, length in ((columns, like.shape[-2]), (rows, like.shape[-1])):
        is_plain = factor.dtype == torch.float32 and factor.is_contiguous()
        if not is_plain or factor.numel() * length != like.numel():
            wanted = f"contiguous float32 factors of {list(like.shape)}"
            raise _refusal(rule, "states", wanted, f"{factor.dtype} of {list(factor.shape)}")


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
