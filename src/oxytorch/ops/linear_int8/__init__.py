"""Linear layer over a weight in panels of 8-bit codes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._binding import entry
from .._op import Cost, Op, Sample, register
from .._panels.product import codes_product
from .._panels.samples import code_calls, linear_cost


def linear_int8(
    x: Tensor,
    panels: Tensor,
    channel_scales: Tensor,
    group_scales: Tensor | None,
    zero_points: Tensor | None,
    out_features: int,
    bias: Tensor | None = None,
    other: Tensor | None = None,
    epilogue: str = "none",
    activation: str = "none",
) -> Tensor:
    """Computes epilogue(x @ weight.T + bias) for a weight in panels.

    x: [..., in_features], float32, bfloat16 or float16; rows may be strided.
    panels: uint8, in the order that `oxytorch.ops._panels.layout` tells; `PanelWeight` makes it.
    channel_scales: float32 [panels, 16] or flat, times group_scales float16 [panels, groups, 16] if
    given; groups have 32, 64, 128 or 256 in_features. zero_points: uint8 [panels, groups, 16], or
    None: 128. A weight is scale * (code - zero point).
    out_features: of the result. bias: [out_features], of x's dtype or float32.
    epilogue: "none", "gelu", "gelu_tanh", "silu", "relu"; "add" adds other [..., out_features];
    "silu_mul", "gelu_mul", "gelu_tanh_mul": panels alternate between gate and up, the activation of
    the gate's result multiplies the up's, and bias has both, gate before up.
    activation: "int8" rounds x to 255 steps a row, dynamically; else bfloat16 x may be rounded to
    15 bits of the largest magnitude of its group, or of 128 neighbours.
    Returns [..., out_features] in x's dtype. Sums and epilogue are float32, rounded once; they do
    not depend on the number of threads. float64 and other devices run `reference`.
    Raises RuntimeError if a shape, dtype, device or name does not fit.
    """
    result: Tensor = _call(
        x,
        panels,
        channel_scales,
        group_scales,
        zero_points,
        out_features,
        bias,
        other,
        epilogue,
        activation,
    )
    return result


def reference(
    x: Tensor,
    panels: Tensor,
    channel_scales: Tensor,
    group_scales: Tensor | None,
    zero_points: Tensor | None,
    out_features: int,
    bias: Tensor | None = None,
    other: Tensor | None = None,
    epilogue: str = "none",
    activation: str = "none",
) -> Tensor:
    """The same in plain PyTorch."""
    return codes_product(
        "int8",
        x,
        panels,
        channel_scales,
        group_scales,
        zero_points,
        out_features,
        bias,
        other,
        epilogue,
        activation,
    )


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    yield from code_calls("int8", dtype, size)


def cost(
    x: Tensor,
    panels: Tensor,
    channel_scales: Tensor,
    group_scales: Tensor | None,
    zero_points: Tensor | None,
    out_features: int,
    bias: Tensor | None = None,
    other: Tensor | None = None,
    epilogue: str = "none",
    activation: str = "none",
) -> Cost:
    """Reads the weight and x, writes the result."""
    return linear_cost(
        x, [panels, channel_scales, group_scales, zero_points, bias, other], out_features, epilogue
    )


_call = entry("linear_int8", reference)

op = register(Op(linear_int8, reference, samples, cost))
