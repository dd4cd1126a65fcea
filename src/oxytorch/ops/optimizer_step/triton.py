"""The GPU kernels of a step: every rule of rules.py with every format, in Triton.

layout.py says what the tables hold; addresses are integers. A kernel does nothing where
`found_inf` is the address of a float32 that is not 0.
"""

import triton
import triton.language as tl

from . import layout
from .triton_formats import CODE_BLOCK, SPLIT, read, write

OPERANDS = tl.constexpr(layout.OPERANDS)
TENSOR_FIELDS = tl.constexpr(layout.TENSOR_FIELDS)
STEP = tl.constexpr(layout.STEP)
COUNT = tl.constexpr(layout.COUNT)
RNG_STREAM = tl.constexpr(layout.RNG_STREAM)
FIRST_BLOCK = tl.constexpr(layout.FIRST_BLOCK)
HEIGHT = tl.constexpr(layout.HEIGHT)
WIDTH = tl.constexpr(layout.WIDTH)
SCALAR_FIELDS = tl.constexpr(layout.SCALAR_FIELDS)
FACTOR = tl.constexpr(layout.FACTOR)
KEY_FIELDS = tl.constexpr(layout.KEY_FIELDS)
BLOCK = tl.constexpr(layout.BLOCK)
BLOCK_FIELDS = tl.constexpr(layout.BLOCK_FIELDS)
SUMS = tl.constexpr(layout.SUMS)


@triton.jit
def optional(address, otherwise, ELEMENT: tl.constexpr):
    """The number at an address, or `otherwise` if the address is 0."""
    return tl.load(address.to(tl.pointer_type(ELEMENT)), mask=address != 0, other=otherwise)


@triton.jit
def mix(x):
    """Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def prepare_step(
    tensors,
    scalars,
    keys,
    count,
    found_inf,
    gradient_scale,
    clip_factor,
    learning_rate,
    seed,
    factor,
    hyper_0,
    hyper_1,
    hyper_2,
    hyper_3,
    hyper_4,
    hyper_5,
    hyper_6,
    hyper_7,
    CONSTANTS: tl.constexpr,
    HYPER: tl.constexpr,
    HAS_STEP: tl.constexpr,
    SCALARS: tl.constexpr,
    STATES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Counts the step; writes scalars and keys. A lane does a tensor, a program LANES of them.

    count: of the tensors.
    gradient_scale, clip_factor: addresses of float32 or 0; gradients are divided by the one and
        multiplied by the other, and by `factor`.
    learning_rate: the address of a float32 that is used in place of hyper_0, or 0.
    seed: of the random numbers.
    """
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    is_left_out = optional(found_inf, 0.0, tl.float32) != 0.0
    mask = lane < tl.where(is_left_out, 0, count)
    lane = lane.to(tl.int64)
    row = tensors.to(tl.pointer_type(tl.int64)) + lane * TENSOR_FIELDS
    hyper = (
        tl.where(
            learning_rate != 0, optional(learning_rate, 0.0, tl.float32).to(tl.float64), hyper_0
        ),
        hyper_1,
        hyper_2,
        hyper_3,
        hyper_4,
        hyper_5,
        hyper_6,
        hyper_7,
    )
    address = tl.load(row + STEP, mask=mask, other=0)
    steps = address.to(tl.pointer_type(tl.float32))
    counts = mask & (address != 0)
    step = tl.load(steps, mask=counts, other=0).to(tl.float64) + 1.0
    tl.store(steps, step.to(tl.float32), mask=counts)
    if HAS_STEP:
        values = CONSTANTS(step, *hyper[:HYPER])
    else:
        values = CONSTANTS(*hyper[:HYPER])
        step = tl.where(address != 0, step, 0.0)
    target = scalars.to(tl.pointer_type(tl.float32)) + lane * SCALAR_FIELDS
    for i in tl.static_range(SCALARS):
        tl.store(target + i, values[i].to(tl.float32), mask=mask)
    clip = optional(clip_factor, 1.0, tl.float32).to(tl.float64)
    scale = optional(gradient_scale, 1.0, tl.float32).to(tl.float64)
    tl.store(target + FACTOR, (clip * factor / scale).to(tl.float32), mask=mask)
    rng_stream = tl.load(row + RNG_STREAM, mask=mask, other=0).to(tl.uint64)
    key = mix(mix(mix(seed.to(tl.uint64)) ^ rng_stream) ^ step.to(tl.int64).to(tl.uint64))
    for i in tl.static_range(STATES):
        own = mix(key ^ i).to(tl.uint32)
        tl.store(keys.to(tl.pointer_type(tl.uint32)) + lane * KEY_FIELDS + i, own, mask=mask)


@triton.jit
def step_piece(
    tensor,
    start,
    formats,
    RULE: tl.constexpr,
    INPUTS: tl.constexpr,
    READS: tl.constexpr,
    WRITES: tl.constexpr,
    SUMS_NORMS: tl.constexpr,
    FORMATS: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The rule on ROWS * CODE_BLOCK elements of a tensor from `start` on; returns what it sums.

    tensor: addresses, the two sizes, the count, scalars, the factor of the gradient, keys, flags.
    """
    addresses, sizes, count, numbers, factor, keys, choices = tensor
    offsets = tl.arange(0, ROWS)[:, None] * CODE_BLOCK + tl.arange(0, CODE_BLOCK)[None, :]
    mask = offsets < count - start
    operands = ()
    for i in tl.static_range(INPUTS):
        if (READS >> i) & 1:
            place = (addresses[2 * i], addresses[2 * i + 1], start, offsets, mask)
            if FORMATS is None:
                value = read(place, sizes, (formats >> (8 * i)) & 255, VECTOR)
            else:
                value = read(place, sizes, (FORMATS >> (8 * i)) & 255, VECTOR)
            if i == 1:
                value = value * factor
        else:
            value = tl.full(offsets.shape, 0.0, tl.float32)
        operands = operands + (value,)
    results = RULE(*operands, *numbers, *choices)
    # An update returns the parameter and the states; a reduction returns states and two values.
    before: tl.constexpr = 2 if SUMS_NORMS else 1
    for i in tl.static_range(INPUTS):
        if (WRITES >> i) & 1:
            place = (addresses[2 * i], addresses[2 * i + 1], start, offsets, mask)
            value = results[0 if i == 0 else i - before]
            if FORMATS is None:
                write(place, (formats >> (8 * i)) & 255, value, keys[i], VECTOR)
            else:
                write(place, (FORMATS >> (8 * i)) & 255, value, keys[i], VECTOR)
    if SUMS_NORMS:
        first = results[len(results) - 2].to(tl.float64)
        second = results[len(results) - 1].to(tl.float64)
        if VECTOR == 0:
            first = tl.where(mask, first, 0.0)
            second = tl.where(mask, second, 0.0)
        return tl.sum(first), tl.sum(second)
    else:
        nothing = tl.full((), 0.0, tl.float64)
        return nothing, nothing


@triton.jit
def sweep(
    tensors,
    blocks,
    block_count,
    scalars,
    keys,
    partials,
    found_inf,
    flags,
    formats,
    RULE: tl.constexpr,
    SCALARS: tl.constexpr,
    FLAGS: tl.constexpr,
    COMPILED: tl.constexpr,
    SETTING: tl.constexpr,
    INPUTS: tl.constexpr,
    READS: tl.constexpr,
    WRITES: tl.constexpr,
    SUMS_NORMS: tl.constexpr,
    FORMATS: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Updates, or reduces, one block after the other.

    A block is done CHUNK elements at a time; PIECE if it is the last of a tensor or does not lie at
    16 bytes.

    flags: the setting of the flags that are not compiled, flag i at bit i.
    formats: as layout.formats_word; counts only if FORMATS is None.
    """
    if optional(found_inf, 0.0, tl.float32) == 0.0:
        for block in range(tl.program_id(0), block_count, tl.num_programs(0)):
            own = blocks.to(tl.pointer_type(tl.int32)) + block * BLOCK_FIELDS
            tensor = tl.load(own).to(tl.int64)
            start = tl.load(own + 1).to(tl.int64) * BLOCK
            row = tensors.to(tl.pointer_type(tl.int64)) + tensor * TENSOR_FIELDS
            count = tl.load(row + COUNT)
            sizes = (tl.load(row + HEIGHT), tl.load(row + WIDTH))
            addresses = ()
            for i in tl.static_range(2 * INPUTS):
                addresses = addresses + (tl.load(row + i),)
            own_scalars = scalars.to(tl.pointer_type(tl.float32)) + tensor * SCALAR_FIELDS
            own_keys = keys.to(tl.pointer_type(tl.uint32)) + tensor * KEY_FIELDS
            numbers = ()
            for i in tl.static_range(SCALARS):
                numbers = numbers + (tl.load(own_scalars + i),)
            choices = ()
            for i in tl.static_range(FLAGS):
                if (COMPILED >> i) & 1:
                    choices = choices + (((SETTING >> i) & 1) != 0,)
                else:
                    choices = choices + (((flags >> i) & 1) != 0,)
            factor = tl.load(own_scalars + FACTOR)
            starts = ()
            for i in tl.static_range(INPUTS):
                if i > 1 and (WRITES >> i) & 1:
                    starts = starts + (tl.load(own_keys + (i - 2)),)
                else:
                    starts = starts + (0,)
            own_tensor = (addresses, sizes, count, numbers, factor, starts, choices)
            first = tl.full((), 0.0, tl.float64)
            second = tl.full((), 0.0, tl.float64)
            left = tl.minimum(count - start, BLOCK).to(tl.int32)
            if FORMATS is not None:
                # Elements move 16 bytes at a time where every address allows it.
                unaligned = tl.full((), 0, tl.int64)
                for i in tl.static_range(INPUTS):
                    if ((READS | WRITES) >> i) & 1:
                        unaligned = unaligned | addresses[2 * i]
                        if (FORMATS >> (8 * i)) & 255 == SPLIT:
                            unaligned = unaligned | addresses[2 * i + 1]
                if ((unaligned & 15) == 0) & (left == BLOCK):
                    for ahead in range(0, BLOCK, CHUNK):
                        more_first, more_second = step_piece(
                            own_tensor, start + ahead, formats, RULE, INPUTS, READS, WRITES,
                            SUMS_NORMS, FORMATS, CHUNK // CODE_BLOCK, VECTOR,
                        )  # fmt: skip
                        first += more_first
                        second += more_second
                    left = left * 0
            for ahead in range(0, left, PIECE):
                more_first, more_second = step_piece(
                    own_tensor, start + ahead, formats, RULE, INPUTS, READS, WRITES,
                    SUMS_NORMS, FORMATS, PIECE // CODE_BLOCK, 0,
                )  # fmt: skip
                first += more_first
                second += more_second
            if SUMS_NORMS:
                sums = partials.to(tl.pointer_type(tl.float64)) + block * SUMS
                tl.store(sums, first)
                tl.store(sums + 1, second)


@triton.jit
def trust_ratio(
    tensors,
    partials,
    sums,
    scalars,
    found_inf,
    phase,
    hyper_0,
    hyper_1,
    hyper_2,
    hyper_3,
    hyper_4,
    hyper_5,
    hyper_6,
    hyper_7,
    TRUST_RATIO: tl.constexpr,
    HYPER: tl.constexpr,
    TAKES_COUNT: tl.constexpr,
    STEP_SIZE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Sums the squares of a tensor, always in one order; multiplies its step size by the ratio.

    A program does a tensor. phase: 0, or 1 to stop at the sums, or 2 to begin with them.
    """
    if optional(found_inf, 0.0, tl.float32) == 0.0:
        tensor = tl.program_id(0).to(tl.int64)
        row = tensors.to(tl.pointer_type(tl.int64)) + tensor * TENSOR_FIELDS
        count = tl.load(row + COUNT)
        own = sums.to(tl.pointer_type(tl.float64)) + tensor * SUMS
        if phase != 2:
            parts = partials.to(tl.pointer_type(tl.float64)) + tl.load(row + FIRST_BLOCK) * SUMS
            lanes = tl.arange(0, LANES)
            first = tl.zeros((LANES,), tl.float64)
            second = tl.zeros((LANES,), tl.float64)
            blocks = ((count + (BLOCK - 1)) // BLOCK).to(tl.int32)
            for begin in range(0, blocks, LANES):
                mask = begin + lanes < blocks
                first += tl.load(parts + (begin + lanes) * SUMS, mask=mask, other=0)
                second += tl.load(parts + (begin + lanes) * SUMS + 1, mask=mask, other=0)
            tl.store(own, tl.sum(first, 0))
            tl.store(own + 1, tl.sum(second, 0))
            first_sum = tl.sum(first, 0)
            second_sum = tl.sum(second, 0)
        else:
            first_sum = tl.load(own)
            second_sum = tl.load(own + 1)
        if phase != 1:
            hyper = (hyper_0, hyper_1, hyper_2, hyper_3, hyper_4, hyper_5, hyper_6, hyper_7)
            if TAKES_COUNT:
                # A tensor without elements has no mean; its step changes nothing.
                number = tl.maximum(count, 1).to(tl.float64)
                factor = TRUST_RATIO(first_sum, second_sum, number, *hyper[:HYPER])
            else:
                factor = TRUST_RATIO(first_sum, second_sum, *hyper[:HYPER])
            step_size = scalars.to(tl.pointer_type(tl.float32)) + tensor * SCALAR_FIELDS + STEP_SIZE
            tl.store(step_size, (tl.load(step_size).to(tl.float64) * factor).to(tl.float32))
