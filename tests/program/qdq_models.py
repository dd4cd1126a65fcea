"""Networks that were quantized elsewhere (QDQ), in the ways in which such graphs are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators of quantized_decomposed
from torch import Tensor, nn
from torch.nn import functional as F

OPERATORS = torch.ops.quantized_decomposed
Pair = Callable[[Tensor, float, int, torch.dtype], Tensor]
"""Rounds numbers to bytes of a scale and a zero point, and makes numbers of them."""


def decomposed(x: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """As torchao's PT2E writes it."""
    ends = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    integers = OPERATORS.quantize_per_tensor(x, scale, zero_point, *ends, dtype)
    found: Tensor = OPERATORS.dequantize_per_tensor(integers, scale, zero_point, *ends, dtype)
    return found


def of_tensors(x: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """The same with tensors of numbers."""
    ends = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    words = torch.tensor(scale), torch.tensor(zero_point), *ends, dtype
    integers = OPERATORS.quantize_per_tensor.tensor(x, *words)
    found: Tensor = OPERATORS.dequantize_per_tensor.tensor(integers, *words)
    return found


def narrow(x: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """In seven bits, as torch.ao's defaults for x86 are."""
    ends = (0, 127) if dtype == torch.uint8 else (-64, 63)
    integers = OPERATORS.quantize_per_tensor(x, scale, zero_point, *ends, dtype)
    found: Tensor = OPERATORS.dequantize_per_tensor(integers, scale, zero_point, *ends, dtype)
    return found


def fake(x: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """Fake quantization of torch."""
    ends = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, *ends)


def formula(x: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """In plain operators, as readers of ONNX files write it."""
    ends = torch.iinfo(dtype)
    integers = torch.clamp(torch.round(x / scale) + zero_point, ends.min, ends.max).to(dtype)
    return (integers.to(torch.float32) - zero_point) * scale


def quantized_tensors(x: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """By torch's quantized tensors."""
    own = torch.quint8 if dtype == torch.uint8 else torch.qint8
    return torch.quantize_per_tensor(x, scale, zero_point, own).dequantize()


PAIRS = (decomposed, of_tensors, narrow, fake, formula, quantized_tensors)


class Weight(nn.Module):
    """Integers of a weight with a scale for each output, and what a layer takes of them.

    axis: of the scales. zero_point: of all. way: how it is written: "integers", "tensor" (of one
    scale), "pair" (numbers that are rounded), "fake" or "formula".
    """

    def __init__(
        self,
        *shape: int,
        axis: int = 0,
        zero_point: int = 0,
        dtype: torch.dtype = torch.int8,
        way: str = "integers",
    ) -> None:
        super().__init__()
        self.axis, self.dtype, self.way, self.zero_point = axis, dtype, way, zero_point
        count, fan = shape[axis], torch.Size(shape).numel() // shape[axis]
        integers = (torch.randint(-127, 128, shape) + zero_point).clamp(
            torch.iinfo(dtype).min, torch.iinfo(dtype).max
        )
        self.register_buffer("integers", integers.to(dtype))
        self.register_buffer("scales", (torch.rand(count) + 0.5) / 64 / fan**0.5)
        self.scale = float(self.scales[0])
        self.register_buffer("zeros", torch.full((count,), zero_point))
        self.numbers = nn.Parameter(self.of_integers().detach())

    def of_integers(self) -> Tensor:
        """The numbers of all integers."""
        sizes = [1] * self.integers.dim()
        sizes[self.axis] = -1
        scales: Any = self.scale if self.way == "tensor" else self.scales.view(sizes)
        found: Tensor = (self.integers.float() - self.zero_point) * scales
        return found

    def forward(self) -> Tensor:
        ends = torch.iinfo(self.dtype)
        words = self.scales, self.zeros, self.axis, ends.min, ends.max
        if self.way == "formula":
            return self.of_integers()
        if self.way == "fake":
            return torch.fake_quantize_per_channel_affine(
                self.numbers, self.scales, self.zeros.int(), self.axis, -127, 127
            )
        if self.way == "tensor":
            found: Tensor = OPERATORS.dequantize_per_tensor(
                self.integers, self.scale, self.zero_point, ends.min, ends.max,
                self.dtype,
            )  # fmt: skip
            return found
        integers = self.integers
        if self.way == "pair":
            integers = OPERATORS.quantize_per_channel(self.numbers, *words, torch.int8)
        found = OPERATORS.dequantize_per_channel(integers, *words, self.dtype)
        return found


WAYS = ("integers", "tensor", "pair", "fake", "formula")


class Net(nn.Module):
    """Convolutions with a shortcut, pooling and a linear layer, between pairs."""

    def __init__(self, pair: Pair = decomposed, way: str = "integers") -> None:
        super().__init__()
        self.pair = pair
        self.first = Weight(16, 3, 3, 3, way=way)
        self.inner = Weight(16, 16, 3, 3, way=way)
        self.last = Weight(24, 16, 1, 1, way=way)
        self.shortcut = Weight(24, 16, 1, 1, way=way)
        self.head = Weight(10, 24, way=way)
        for name in ("first", "inner", "last", "shortcut", "head"):
            weight = getattr(self, name).integers
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(len(weight)) / 4))

    def forward(self, x: Tensor) -> Tensor:
        pair = self.pair
        x = pair(x, 0.03, 60, torch.uint8)
        x = torch.relu(F.conv2d(x, self.first(), self.first_bias, 2, 1))
        x = pair(F.max_pool2d(pair(x, 0.02, 0, torch.uint8), 3, 2, 1), 0.02, 0, torch.uint8)
        inner = torch.relu(F.conv2d(x, self.inner(), self.inner_bias, 1, 1))
        inner = pair(inner, 0.02, 0, torch.uint8)
        shortcut = F.conv2d(x, self.shortcut(), self.shortcut_bias)
        shortcut = pair(shortcut, 0.03, 3, torch.int8)
        x = torch.relu(F.conv2d(inner, self.last(), self.last_bias) + shortcut)
        x = pair(x, 0.02, 1, torch.uint8)
        x = pair(x.mean((2, 3)), 0.02, 0, torch.uint8)
        x = F.linear(x, self.head(), self.head_bias)
        return pair(x, STEP, 2, torch.int8)


class Depthwise(nn.Module):
    """A depthwise convolution before another one."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = Weight(32, 1, 3, 3, way="integers")
        self.pointwise = Weight(24, 32, 1, 1, way="integers")

    def forward(self, x: Tensor) -> Tensor:
        x = decomposed(x, 0.03, 60, torch.uint8)
        x = torch.relu(F.conv2d(x, self.depthwise(), None, 1, 1, groups=32))
        x = decomposed(x, 0.01, 0, torch.uint8)
        return decomposed(F.conv2d(x, self.pointwise()), STEP, 2, torch.int8)


STEP = 0.02
"""Between numbers that the network gives."""
