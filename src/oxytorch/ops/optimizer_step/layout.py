"""The tables that the GPU kernels of a step read: where tensors lie, and what is kept for each.

Triton and OpenCL kernels share them. Every table is contiguous and on the device of the tensors;
kernels take its address. One step runs `prepare_step` once for a group, then `reduce_norms` and
`trust_ratio` for rules whose steps need norms, then `update`; all read `tensors`, and what one
kernel writes (`scalars`, `keys`, `partials`, `sums`) the next reads, so nothing comes back to the
host.

`tensors`: int64 [n, TENSOR_FIELDS], a row for each tensor:
  2 i, 2 i + 1  of operand i (parameter, gradient, states): the address of its data, and of its
                extra: low half, scales of codes, row factors; 0 without one. GRADIENT is 2 i of
                the gradient
  STEP          address of the float32 number of steps done; 0 if the rule does not count them
  COUNT         number of elements
  RNG_STREAM    number of its stream of random numbers
  FIRST_BLOCK   where its blocks begin in `blocks`
  HEIGHT, WIDTH the last two sizes of a tensor with a factored state; else 0. There data and extra
                of the state are its columns and the factors of its rows, and besides
  ROWS          is the address of the rows that are kept: float32, a mean for each
  STRIPS        that of float32 [mean_squares.tiling.strip_count, WIDTH], to work in
`blocks`: int32 [number of blocks, 2], for each block of BLOCK elements: the tensor, and the number
  of the block within it. Blocks of a tensor follow each other.
`scalars`: float32 [n, SCALAR_FIELDS]: the rule's scalars in the order of its arguments; at FACTOR
  what the gradient is multiplied by.
`keys`: int32 [n, KEY_FIELDS]: where the random numbers of state k start, as unsigned bits.
`partials`: float64 [number of blocks, SUMS], `sums`: float64 [n, SUMS]: of rules with norms.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor


class Format(enum.IntEnum):
    """How an operand is kept in memory, as `Format` of kernel.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    SPLIT = 3
    STOCHASTIC = 4
    SIGNED_CODES = 5
    UNSIGNED_CODES = 6
    FACTORED = 7
    ABSENT = 8
    """Neither read nor written."""


FLOATS = {
    torch.float32: Format.FLOAT32,
    torch.bfloat16: Format.BFLOAT16,
    torch.float16: Format.FLOAT16,
}
"""The formats of gradients, and of all that is kept as plain numbers."""

OPERANDS = 5
"""The parameter, the gradient and at most three states."""

TENSOR_FIELDS = 16
STEP, COUNT, RNG_STREAM, FIRST_BLOCK, HEIGHT, WIDTH = range(2 * OPERANDS, TENSOR_FIELDS)
GRADIENT = 2
COLUMNS, ROW_FACTORS = 4, 5
"""Data and extra of a factored state, which is the first."""

ROWS, STRIPS = 6, 8
"""In place of the last two operands."""

BLOCK_FIELDS = 2

SCALAR_FIELDS = 16
FACTOR = 15

KEY_FIELDS = 8

SUMS = 2
"""How many sums such a rule takes over each tensor."""

WHOLE, REDUCE_NORMS, UPDATE = range(3)
"""Phases of a rule with norms: both sweeps over the tensors, the first, or the second."""

CODE_BLOCK = 256
"""Elements that share a bound."""

BLOCK = 1024
"""Elements of a block; a multiple of CODE_BLOCK."""

HYPER = 8
"""How many hyper-parameters `prepare_step` and `trust_ratio` take, the learning rate first."""

FORMAT_BITS = 8
"""Bits of an operand in the word that tells a kernel the formats."""


def block_counts(counts: Tensor) -> Tensor:
    """The number of blocks of tensors with `counts` elements (int64 [n])."""
    return (counts + (BLOCK - 1)) // BLOCK


def block_table(counts: Tensor) -> Tensor:
    """`blocks` of tensors with `counts` elements (int64 [n])."""
    blocks = block_counts(counts)
    tensor = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), blocks)
    first = torch.cumsum(blocks, 0) - blocks
    number = torch.arange(len(tensor), device=counts.device) - first[tensor]
    return torch.stack([tensor, number], 1).int()


def formats_word(formats: Sequence[Format]) -> int:
    """The formats of all operands as one number, operand i in bits 8 i and above."""
    padded = [*formats, *[Format.ABSENT] * (OPERANDS - len(formats))]
    return sum(int(own) << FORMAT_BITS * i for i, own in enumerate(padded))


def formats_of(word: int) -> tuple[Format, ...]:
    """The formats of all operands, from their word."""
    return tuple(Format(word >> FORMAT_BITS * i & 255) for i in range(OPERANDS))
