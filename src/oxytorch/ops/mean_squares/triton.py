"""Adafactor's rows and columns on a GPU, from the tables of a step (optimizer_step/layout.py).

`factor_sums` runs after `prepare_step` and `factors` after it; then a step reads the factors. Both
go through a table of tiles (tiling.py): of matrices with more than SMALL elements a tile is a
strip of rows, of smaller ones it is LANES rows or columns, of as many matrices as they lie in.
"""

import triton
import triton.language as tl

from ..optimizer_step import layout
from ..optimizer_step.triton import optional
from ..optimizer_step.triton_formats import elements
from ..optimizer_step.triton_rules import functions
from . import tiling

lerp = functions()["lerp"]

TENSOR_FIELDS = tl.constexpr(layout.TENSOR_FIELDS)
SCALAR_FIELDS = tl.constexpr(layout.SCALAR_FIELDS)
FACTOR = tl.constexpr(layout.FACTOR)
BLOCK_FIELDS = tl.constexpr(layout.BLOCK_FIELDS)
GRADIENT = tl.constexpr(layout.GRADIENT)
COLUMNS = tl.constexpr(layout.COLUMNS)
ROW_FACTORS = tl.constexpr(layout.ROW_FACTORS)
ROWS = tl.constexpr(layout.ROWS)
STRIPS = tl.constexpr(layout.STRIPS)
COUNT = tl.constexpr(layout.COUNT)
HEIGHT = tl.constexpr(layout.HEIGHT)
WIDTH = tl.constexpr(layout.WIDTH)
SMALL = tl.constexpr(tiling.SMALL)
LANES = tl.constexpr(tiling.LANES)
WIDE = tl.constexpr(2048)
STRIP = tl.constexpr(tiling.STRIP)
STRIPE = tl.constexpr(tiling.STRIPE)


@triton.jit
def _move(state, index, mask, total, count, factor, weight):
    """Moves means that are kept at `state` towards those of this step."""
    pointers = state.to(tl.pointer_type(tl.float32)) + index
    mean = tl.div_rn(total, count.to(tl.float32)) * (factor * factor)
    moved = lerp(tl.load(pointers, mask=mask, other=0), mean, weight)
    tl.store(pointers, moved, mask=mask)


@triton.jit
def _squares(gradient, index, mask, ELEMENT: tl.constexpr):
    pointers = elements(gradient, index * 0, index, ELEMENT, 0)
    value = tl.load(pointers, mask=mask, other=0).to(tl.float32)
    return value * value


@triton.jit
def _strip(row, number, height, width, factor, weight, ELEMENT: tl.constexpr):
    """A strip of a matrix: its rows, and the sums over its columns."""
    strips = (height + (STRIP - 1)) // STRIP
    matrix = number // strips
    first = number % strips * STRIP
    down = first + tl.arange(0, STRIP)[:, None]
    across = tl.arange(0, STRIPE)
    totals = tl.zeros((STRIP, STRIPE), tl.float32)
    gradient = tl.load(row + GRADIENT)
    sums = tl.load(row + STRIPS).to(tl.pointer_type(tl.float32)) + number * width
    for left in range(0, width, STRIPE):
        column = left + across
        mask = (down < height) & (column < width)[None, :]
        index = (matrix * height + down) * width + column[None, :]
        squares = _squares(gradient, index, mask, ELEMENT)
        totals += squares
        tl.store(sums + column, tl.sum(squares, 0), mask=column < width)
    place = first + tl.arange(0, STRIP)
    index = matrix * height + place
    total = tl.sum(totals, 1)
    _move(tl.load(row + ROWS), index, place < height, total, width, factor, weight)


@triton.jit
def _small(row, number, height, width, count, factor, weight, ELEMENT: tl.constexpr):
    """LANES rows, or LANES columns, of matrices that may be many."""
    rows = count // tl.maximum(width, 1)
    row_tiles = (rows + (LANES - 1)) // LANES
    total = tl.zeros((LANES,), tl.float32)
    gradient = tl.load(row + GRADIENT)
    if number < row_tiles:
        index = number * LANES + tl.arange(0, LANES)
        for i in range(width):
            total += _squares(gradient, index * width + i, index < rows, ELEMENT)
        _move(tl.load(row + ROWS), index, index < rows, total, width, factor, weight)
    else:
        index = (number - row_tiles) * LANES + tl.arange(0, LANES)
        mask = index < count // tl.maximum(height, 1)
        begin = index // width * (height * width) + index % width
        for i in range(height):
            total += _squares(gradient, begin + i * width, mask, ELEMENT)
        _move(tl.load(row + COLUMNS), index, mask, total, height, factor, weight)


@triton.jit
def _tile(tensors, tiles, scalars):
    """The tile of this program: the tensor's row, its scalars, and the tile's number within it."""
    tile = tiles.to(tl.pointer_type(tl.int32)) + tl.program_id(0) * BLOCK_FIELDS
    tensor = tl.load(tile).to(tl.int64)
    number = tl.load(tile + 1).to(tl.int64)
    row = tensors.to(tl.pointer_type(tl.int64)) + tensor * TENSOR_FIELDS
    return row, scalars.to(tl.pointer_type(tl.float32)) + tensor * SCALAR_FIELDS, number


@triton.jit
def factor_sums(tensors, tiles, scalars, found_inf, ELEMENT: tl.constexpr, WEIGHT: tl.constexpr):
    """Squares of the gradients: means over rows move the states, those over columns too where
    matrices are small; where they are not, sums over the columns of each strip are kept."""
    if optional(found_inf, 0.0, tl.float32) == 0.0:
        row, own, number = _tile(tensors, tiles, scalars)
        height = tl.load(row + HEIGHT)
        width = tl.load(row + WIDTH)
        weight = tl.load(own + WEIGHT)
        factor = tl.load(own + FACTOR)
        if height * width > SMALL:
            _strip(row, number, height, width, factor, weight, ELEMENT)
        else:
            _small(row, number, height, width, tl.load(row + COUNT), factor, weight, ELEMENT)


@triton.jit
def _small_factors(source, target, number, matrices, height, least):
    """The factors of the rows of LANES matrices."""
    index = number * LANES + tl.arange(0, LANES)
    mask = index < matrices
    total = tl.zeros((LANES,), tl.float32)
    for i in range(height):
        total += tl.load(source + index * height + i, mask=mask, other=0)
    mean = _at_least(tl.div_rn(total, height.to(tl.float32)), least)
    for i in range(height):
        value = tl.load(source + index * height + i, mask=mask, other=0)
        tl.store(target + index * height + i, tl.div_rn(value, mean), mask=mask)


@triton.jit
def _row_factors(source, target, height, least):
    """The factors of the rows of a matrix."""
    lanes = tl.arange(0, WIDE)
    totals = tl.zeros((WIDE,), tl.float32)
    for i in range(0, height, WIDE):
        totals += tl.load(source + i + lanes, mask=i + lanes < height, other=0)
    mean = _at_least(tl.div_rn(tl.sum(totals, 0), height.to(tl.float32)), least)
    for i in range(0, height, WIDE):
        value = tl.load(source + i + lanes, mask=i + lanes < height, other=0)
        tl.store(target + i + lanes, tl.div_rn(value, mean), mask=i + lanes < height)


@triton.jit
def _columns(row, number, height, width, factor, weight):
    """STRIPE columns of a matrix, from the sums of its strips."""
    stripes = (width + (STRIPE - 1)) // STRIPE
    matrix = number // stripes
    column = number % stripes * STRIPE + tl.arange(0, STRIPE)
    strips = (height + (STRIP - 1)) // STRIP
    sums = tl.load(row + STRIPS).to(tl.pointer_type(tl.float32)) + matrix * strips * width
    down = tl.arange(0, STRIP)[:, None]
    totals = tl.zeros((STRIP, STRIPE), tl.float32)
    for i in range(0, strips, STRIP):
        mask = (i + down < strips) & (column < width)[None, :]
        totals += tl.load(sums + (i + down) * width + column[None, :], mask=mask, other=0)
    index = matrix * width + column
    total = tl.sum(totals, 0)
    _move(tl.load(row + COLUMNS), index, column < width, total, height, factor, weight)


@triton.jit
def factors(tensors, tiles, scalars, found_inf, least, WEIGHT: tl.constexpr):
    """Columns of matrices that are not small; what their rows are multiplied by in the variance:
    row / max(mean of the rows, least)."""
    if optional(found_inf, 0.0, tl.float32) == 0.0:
        row, own, number = _tile(tensors, tiles, scalars)
        height = tl.load(row + HEIGHT)
        width = tl.load(row + WIDTH)
        source = tl.load(row + ROWS).to(tl.pointer_type(tl.float32))
        target = tl.load(row + ROW_FACTORS).to(tl.pointer_type(tl.float32))
        matrices = tl.load(row + COUNT) // tl.maximum(height * width, 1)
        if height * width <= SMALL:
            _small_factors(source, target, number, matrices, height, least)
        elif number < matrices:
            _row_factors(source + number * height, target + number * height, height, least)
        else:
            factor = tl.load(own + FACTOR)
            weight = tl.load(own + WEIGHT)
            _columns(row, number - matrices, height, width, factor, weight)


@triton.jit
def _at_least(mean, least):
    """The larger of the two; NaN if the mean is."""
    return tl.where(mean < least.to(tl.float32), least.to(tl.float32), mean)
