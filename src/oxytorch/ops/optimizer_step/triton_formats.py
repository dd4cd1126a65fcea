"""How operands are kept in memory, for Triton: the formats of formats.h, bit for bit.

A piece of a tensor is [rows, CODE_BLOCK] elements from `start` on. Where VECTOR is not 0 all of
them are there, they lie at multiples of 16 bytes, and threads move so many at a time, up to 16
bytes; else `mask` tells which exist.
"""

import triton
import triton.language as tl

from . import layout
from .layout import Format

CODE_BLOCK = tl.constexpr(layout.CODE_BLOCK)
FLOAT32 = tl.constexpr(int(Format.FLOAT32))
BFLOAT16 = tl.constexpr(int(Format.BFLOAT16))
FLOAT16 = tl.constexpr(int(Format.FLOAT16))
SPLIT = tl.constexpr(int(Format.SPLIT))
STOCHASTIC = tl.constexpr(int(Format.STOCHASTIC))
SIGNED_CODES = tl.constexpr(int(Format.SIGNED_CODES))
UNSIGNED_CODES = tl.constexpr(int(Format.UNSIGNED_CODES))
FACTORED = tl.constexpr(int(Format.FACTORED))

GOLDEN = tl.constexpr(0x9E3779B9)
"""2^32 divided by the golden ratio: the step of the random numbers."""


@triton.jit
def elements(address, start, offsets, ELEMENT: tl.constexpr, VECTOR: tl.constexpr):
    """Pointers to elements of the type ELEMENT."""
    size: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    first = (address + start * size).to(tl.pointer_type(ELEMENT))
    if VECTOR:
        first = tl.multiple_of(first, size * VECTOR if size * VECTOR < 16 else 16)
    return first + offsets


@triton.jit
def load(address, start, offsets, mask, ELEMENT: tl.constexpr, VECTOR: tl.constexpr):
    pointers = elements(address, start, offsets, ELEMENT, VECTOR)
    if VECTOR:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0)


@triton.jit
def store(address, start, offsets, mask, value, ELEMENT: tl.constexpr, VECTOR: tl.constexpr):
    pointers = elements(address, start, offsets, ELEMENT, VECTOR)
    if VECTOR:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=mask)


@triton.jit
def read(place, sizes, format, VECTOR: tl.constexpr):
    """The float32 values of a piece of an operand.

    place: the addresses of its data and its extra, `start`, offsets, mask.
    sizes: the last two of a factored operand.
    format: a constant, or known when the kernel runs.
    """
    data, extra, start, offsets, mask = place
    if format == FLOAT32:
        value = load(data, start, offsets, mask, tl.float32, VECTOR)
    elif format == FLOAT16:
        value = load(data, start, offsets, mask, tl.float16, VECTOR).to(tl.float32)
    elif format == SPLIT:
        upper = load(data, start, offsets, mask, tl.uint16, VECTOR).to(tl.uint32)
        low = load(extra, start, offsets, mask, tl.uint16, VECTOR).to(tl.uint32)
        # The lower half is signed.
        value = ((upper << 16) + ((low ^ 0x8000) - 0x8000)).to(tl.float32, bitcast=True)
    elif format == SIGNED_CODES:
        value = _decode(data, extra, start, offsets, mask, True, VECTOR)
    elif format == UNSIGNED_CODES:
        value = _decode(data, extra, start, offsets, mask, False, VECTOR)
    elif format == FACTORED:
        value = _multiply_factors(data, extra, sizes, start, offsets, mask)
    else:
        value = load(data, start, offsets, mask, tl.bfloat16, VECTOR).to(tl.float32)
    return value


@triton.jit
def write(place, format, value, key, VECTOR: tl.constexpr):
    """Keeps the float32 values. key: where the random numbers of the tensor start."""
    data, extra, start, offsets, mask = place
    if format == FLOAT32:
        store(data, start, offsets, mask, value, tl.float32, VECTOR)
    elif format == FLOAT16:
        store(data, start, offsets, mask, value.to(tl.float16), tl.float16, VECTOR)
    elif format == BFLOAT16:
        store(data, start, offsets, mask, value.to(tl.bfloat16), tl.bfloat16, VECTOR)
    elif format == SPLIT:
        bits = value.to(tl.uint32, bitcast=True)
        # A NaN stays one whatever its lower bits are.
        nearest = tl.where(value == value, bits + 0x8000, bits | 0x400000)
        store(data, start, offsets, mask, (nearest >> 16).to(tl.uint16), tl.uint16, VECTOR)
        store(extra, start, offsets, mask, bits.to(tl.uint16), tl.uint16, VECTOR)
    elif format == STOCHASTIC:
        bits = value.to(tl.uint32, bitcast=True)
        noisy = bits + (_noise(start, offsets, key) >> 16)
        # A NaN stays one whatever its lower bits are.
        result = tl.where(value == value, noisy, bits | 0x400000)
        store(data, start, offsets, mask, (result >> 16).to(tl.uint16), tl.uint16, VECTOR)
    elif format == SIGNED_CODES:
        _encode(data, extra, start, offsets, mask, value, key, True, VECTOR)
    elif format == UNSIGNED_CODES:
        _encode(data, extra, start, offsets, mask, value, key, False, VECTOR)


@triton.jit
def _noise(start, offsets, key):
    """Numbers that are spread evenly over 32 bits: a Weyl sequence."""
    return offsets.to(tl.uint32) * GOLDEN + (start.to(tl.uint32) * GOLDEN + key)


@triton.jit
def _bounds(extra, start, offsets):
    """Pointers to the bounds of the piece's rows."""
    rows = tl.arange(0, offsets.shape[0])[:, None]
    first = (extra + start // CODE_BLOCK * 4).to(tl.pointer_type(tl.uint32))
    return first + rows


@triton.jit
def _any_in_row(offsets, mask):
    """Whether the first element of each row exists."""
    return (
        tl.max(tl.where(offsets % CODE_BLOCK == 0, mask, False).to(tl.int32), 1, keep_dims=True)
        != 0
    )


@triton.jit
def _decode(data, extra, start, offsets, mask, SIGNED: tl.constexpr, VECTOR: tl.constexpr):
    shift: tl.constexpr = 20 if SIGNED else 19
    last: tl.constexpr = 127 if SIGNED else 255
    pointers = _bounds(extra, start, offsets)
    if VECTOR:
        bound = tl.load(pointers)
    else:
        bound = tl.load(pointers, mask=_any_in_row(offsets, mask), other=0)
    zero = (bound >> shift) - last
    code = load(data, start, offsets, mask, tl.uint8, VECTOR).to(tl.uint32)
    if SIGNED:
        magnitude = code & last
        bits = tl.where(magnitude != 0, (magnitude + zero) << shift, 0) | ((code & 128) << 24)
    else:
        bits = (code + zero) << shift
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _encode(
    data, extra, start, offsets, mask, value, key, SIGNED: tl.constexpr, VECTOR: tl.constexpr
):
    shift: tl.constexpr = 20 if SIGNED else 19
    first: tl.constexpr = 0 if SIGNED else 1
    last: tl.constexpr = 127 if SIGNED else 255
    round_up: tl.constexpr = (1 << shift) - 1
    if VECTOR == 0:
        value = tl.where(mask, value, 0.0)
    bits = value.to(tl.uint32, bitcast=True)
    # Without the sign, which a NaN may have anywhere, bits are in the order of the values. Those of
    # a NaN, rounded up, may be those of -0.
    magnitude = bits & 0x7FFFFFFF
    largest = tl.max(magnitude.to(tl.int32), 1, keep_dims=True)
    largest = tl.minimum(largest, 0x7FC00000).to(tl.uint32)
    bound = ((largest + round_up) >> shift) << shift
    pointers = _bounds(extra, start, offsets)
    if VECTOR:
        tl.store(pointers, bound)
    else:
        tl.store(pointers, bound, mask=_any_in_row(offsets, mask))
    noisy = magnitude + (_noise(start, offsets, key) >> (32 - shift))
    zero = (bound >> shift).to(tl.int32) - last
    code = (noisy >> shift).to(tl.int32) - zero
    code = tl.minimum(tl.maximum(code, first), last).to(tl.uint32)
    if SIGNED:
        code = code | ((bits >> 31) << 7)
    store(data, start, offsets, mask, code.to(tl.uint8), tl.uint8, VECTOR)


@triton.jit
def _quotient(x, y):
    """x // y of integers that are not negative, faster where they have 32 bits."""
    if (x | y) < 4294967296:
        result = (x.to(tl.uint32) // y.to(tl.uint32)).to(tl.int64)
    else:
        result = x // y
    return result


@triton.jit
def _multiply_factors(columns, rows, sizes, start, offsets, mask):
    """The product of a column in `columns` and a row in `rows`, of matrices of two `sizes`."""
    height, width = sizes
    piece: tl.constexpr = offsets.shape[0] * offsets.shape[1]
    row = _quotient(start, width)
    matrix = _quotient(row, height)
    row_of_matrix = row - matrix * height
    ahead = start - row * width
    column = ahead.to(tl.uint32) + offsets.to(tl.uint32)
    if width >= piece:
        down = (column >= width).to(tl.uint32)
    else:
        down = column // width.to(tl.uint32)
    column = column - down * width.to(tl.uint32)
    last = row_of_matrix + _quotient(ahead + (piece - 1), width)
    if last >= height:
        column += (row_of_matrix.to(tl.uint32) + down) // height.to(tl.uint32) * width.to(tl.uint32)
    column_pointers = (columns + matrix * width * 4).to(tl.pointer_type(tl.float32)) + column
    row_pointers = (rows + row * 4).to(tl.pointer_type(tl.float32)) + down
    factor = tl.load(row_pointers, mask=mask, other=0)
    return factor * tl.load(column_pointers, mask=mask, other=0)
