"""The norm of gradients on a GPU, from the tables of a step (optimizer_step/layout.py)."""

import triton
import triton.language as tl

from ..optimizer_step import layout
from ..optimizer_step.triton import BLOCK, BLOCK_FIELDS, COUNT, TENSOR_FIELDS, optional
from ..optimizer_step.triton_formats import CODE_BLOCK, read

GRADIENT = tl.constexpr(layout.GRADIENT)


@triton.jit
def sum_squares(tensors, blocks, block_count, partials, FORMAT: tl.constexpr):
    """The sum over the blocks of each program, in float64; the sum is the same in every run.

    partials: float64, one per program.
    """
    offsets = (
        tl.arange(0, BLOCK // CODE_BLOCK)[:, None] * CODE_BLOCK + tl.arange(0, CODE_BLOCK)[None, :]
    )
    total = tl.zeros(offsets.shape, tl.float64)
    for block in range(tl.program_id(0), block_count, tl.num_programs(0)):
        own = blocks.to(tl.pointer_type(tl.int32)) + block * BLOCK_FIELDS
        row = tensors.to(tl.pointer_type(tl.int64)) + tl.load(own).to(tl.int64) * TENSOR_FIELDS
        start = tl.load(own + 1).to(tl.int64) * BLOCK
        address = tl.load(row + GRADIENT)
        left = tl.load(row + COUNT) - start
        mask = offsets < left
        if ((address & 15) == 0) & (left >= BLOCK):
            value = read((address, 0, start, offsets, mask), (0, 0), FORMAT, 8)
        else:
            value = read((address, 0, start, offsets, mask), (0, 0), FORMAT, 0)
        value = value.to(tl.float64)
        total = tl.fma(value, value, total)
    target = partials.to(tl.pointer_type(tl.float64)) + tl.program_id(0)
    tl.store(target, tl.sum(total))


@triton.jit
def finish(partials, count, gradient_scale, max_norm, norm, clip_factor, LANES: tl.constexpr):
    """The norm of gradients without the scale, and what they are to be multiplied by; float32.

    count: of the partial sums.
    gradient_scale: the address of a float32 that the gradients contain, or 0.
    clip_factor: min(1, max_norm / (norm + 1e-6)) as torch computes it; not written at 0.
    """
    lanes = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.float64)
    for begin in range(0, count, LANES):
        source = partials.to(tl.pointer_type(tl.float64)) + begin + lanes
        total += tl.load(source, mask=begin + lanes < count, other=0)
    value = tl.sqrt(tl.sum(total, 0)).to(tl.float32)
    value = tl.div_rn(value, optional(gradient_scale, 1.0, tl.float32))
    tl.store(norm.to(tl.pointer_type(tl.float32)), value)
    factor = tl.div_rn(1.0, value + 1e-6) * max_norm.to(tl.float32)
    # A norm that is NaN makes the factor NaN.
    factor = tl.where(factor > 1.0, 1.0, factor)
    tl.store(clip_factor.to(tl.pointer_type(tl.float32)), factor, mask=clip_factor != 0)
