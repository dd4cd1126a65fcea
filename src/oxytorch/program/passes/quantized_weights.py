"""What makes the bytes of a layer's weight, as steps: done once, and again after a write to it.

Each output has its own scale, its largest magnitude / 127, and bytes from -127 to 127.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops.panels import layout
from ...ops.quantized_convolution import MOST_LINES, is_depthwise
from ...ops.quantized_linear import MOST_PRODUCTS
from ..program import Argument, Some, Step, Value
from .editor import known

LARGEST = 127
SMALLEST = torch.finfo(torch.float32).tiny
"""The least magnitude that is divided by."""
PACK = "oxytorch::pack_panels"


class Making:
    """Steps that are written one after the other; constants: of the program, where more go."""

    def __init__(self, constants: dict[Value, Tensor]) -> None:
        self.steps: list[Step] = []
        self.constants = constants

    def __call__(self, target: str, *arguments: Argument) -> Value:
        """Add a step of one result, which is returned."""
        result = Value()
        self.steps.append(Step(target, [*arguments], [result]))
        return result

    def to(self, value: Value, dtype: torch.dtype) -> Value:
        """The value in a dtype."""
        if value.meta is not None and value.meta.dtype == dtype:
            return value
        word = f"={dtype}".replace("torch.", "")
        return self("aten::_to_copy", value, Some(word), *["none"] * 3, "false", "none")

    def reshaped(self, value: Value, *sizes: int) -> Value:
        """The value in another shape."""
        return self("aten::reshape", value, [*map(str, sizes)])

    def padded(self, value: Value, *sizes: int) -> Value:
        """The value with zeros around its last dimensions, of sizes as in `functional.pad`."""
        if not any(sizes):
            return value
        return self("aten::pad", value, [*map(str, sizes)], '"constant"', Some("0.0"))

    def constant(self, number: float) -> Value:
        """A number in float32."""
        value = Value()
        self.constants[value] = torch.tensor(number, device="cpu")
        return value


Rounded = tuple[Value, Value]
"""The integers of a weight, int8 [out, ...], and the scales of its outputs, float32."""


def bytes_of_linear(make: Making, weight: Value, stored: Rounded | None = None) -> list[Argument]:
    """Panels, channel_scales, channel_sums and out_features of a weight [out, in].

    stored: its integers, where these are given.
    """
    outputs, _ = _size(weight)
    return [*_matrix(make, *(stored or _rounded(make, weight)), outputs), str(outputs)]


def _matrix(make: Making, integers: Value, scales: Value, outputs: int) -> list[Argument]:
    """Panels, channel_scales and channel_sums of a matrix."""
    more = -outputs % layout.OUTPUTS
    sums = make("aten::sum.dim_IntList", integers, Some(["1"]), "false", Some("=int32"))
    panels = _packed(make, integers)
    return [panels, make.padded(scales, 0, more), make.padded(sums, 0, more)]


def bytes_of_convolution(
    make: Making, weight: Value, groups: int, stored: Rounded | None = None
) -> list[Argument]:
    """Panels, channel_scales and channel_sums of a weight [out, in / groups, *kernel], in the order
    of `quantized_convolution.pack_convolution`. stored: its integers, where these are given."""
    outputs, channels, *kernel = _size(weight)
    integers, scales = stored or _rounded(make, weight)
    if is_depthwise(outputs, channels, groups):
        lines = make.reshaped(integers, outputs, -1, kernel[-1])
        columns = make("aten::permute", lines, ["0", "2", "1"])
        columns = make.padded(columns, 0, -math.prod(kernel[:-1]) % 4)
        return _matrix(make, make.reshaped(columns, outputs, -1), scales, outputs)
    order = ["0", *(str(dim + 2) for dim in range(len(kernel))), "1"]
    each, more = outputs // groups, -(outputs // groups) % layout.OUTPUTS
    columns = make("aten::permute", integers, order)
    lines = make.reshaped(columns, groups, each, math.prod(kernel[:-1]), kernel[-1] * channels)
    padded = make.padded(lines, 0, -(kernel[-1] * channels) % 4, 0, 0, 0, more)
    matrix = make.reshaped(padded, groups * (each + more), -1)
    sums = make("aten::sum.dim_IntList", matrix, Some(["1"]), "false", Some("=int32"))
    every = make.padded(make.reshaped(scales, groups, each), 0, more)
    return [_packed(make, matrix), make.reshaped(every, -1), sums]


def why_not_groups(size: Sequence[int], groups: int) -> str:
    """Why a convolution with a weight of a size cannot multiply bytes; empty if it can."""
    outputs, channels, *lines, columns = size
    count, run, is_own = (
        math.prod(lines),
        columns * channels,
        is_depthwise(outputs, channels, groups),
    )
    if is_own and count > MOST_LINES:
        return f"its kernels have more than {MOST_LINES} lines"
    products = columns * (count + -count % 4) if is_own else count * (run + -run % 4)
    if products > MOST_PRODUCTS:
        return f"it sums more than {MOST_PRODUCTS} products"
    if groups > 1 and not is_own and outputs // groups < layout.OUTPUTS:
        return f"integers are slower where a group has fewer than {layout.OUTPUTS} outputs"
    return ""


def bytes_of_recurrent(make: Making, weight: Value, gates: int) -> list[Argument]:
    """Panels, scales and sums of a weight [gates * hidden, in], in the order of
    `ops.recurrent.units_together`."""
    outputs, width = _size(weight)
    hidden = outputs // gates
    integers, scales = _rounded(make, weight)
    matrix = _units_together(make, integers, gates, hidden, width)
    sums = make("aten::sum.dim_IntList", matrix, Some(["1"]), "false", Some("=int32"))
    ordered = _units_together(make, make.reshaped(scales, outputs, 1), gates, hidden, 1)
    return [_packed(make, matrix), make.reshaped(ordered, -1), sums]


def _units_together(make: Making, rows: Value, gates: int, hidden: int, width: int) -> Value:
    more = -hidden % layout.OUTPUTS
    padded = make.padded(make.reshaped(rows, gates, hidden, width), 0, 0, 0, more)
    blocks = (hidden + more) // layout.OUTPUTS
    apart = make.reshaped(padded, gates, blocks, layout.OUTPUTS, width)
    together = make("aten::permute", apart, ["1", "0", "2", "3"])
    return make.reshaped(together, gates * blocks * layout.OUTPUTS, width)


def wide_bias(make: Making, bias: Argument) -> Argument:
    """An optional bias in float32."""
    return Some(make.to(bias.item, torch.float32)) if isinstance(bias, Some) else bias


def _rounded(make: Making, weight: Value) -> Rounded:
    outputs, *rest = _size(weight)
    rows = make.reshaped(make.to(weight, torch.float32), outputs, -1)
    largest = make("aten::amax", make("aten::abs", rows), ["1"], "false")
    scales = make("aten::div.Tensor", largest, make.constant(LARGEST))
    scales = make("aten::maximum", scales, make.constant(SMALLEST))
    quotients = make("aten::div.Tensor", rows, make.reshaped(scales, outputs, 1))
    integers = make("aten::_to_copy", make("aten::round", quotients), Some("=int8"),
                    *["none"] * 3, "false", "none")  # fmt: skip
    return make.reshaped(integers, outputs, *rest), scales


def _packed(make: Making, matrix: Value) -> Value:
    codes = make("aten::view.dtype", make("aten::contiguous", matrix, "=contiguous_format"),
                 "=uint8")  # fmt: skip
    return make(PACK, codes, '"int8"', "false")


def _size(weight: Value) -> tuple[int, ...]:
    meta: Any = weight.meta
    size = known(meta.shape)
    assert size is not None
    return size
