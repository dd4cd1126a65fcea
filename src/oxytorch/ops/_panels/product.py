"""Products with packed weights in plain PyTorch: the reference of every linear op."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from . import layout

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda v: v,
    "add": lambda v: v,
    "gelu": F.gelu,
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "gelu_mul": F.gelu,
    "gelu_tanh_mul": lambda v: F.gelu(v, approximate="tanh"),
    "silu_mul": F.silu,
}
"""What each epilogue does to the sums; `_mul` then multiplies by the other half of the weight."""


def is_gated(epilogue: str) -> bool:
    """Whether the epilogue wants a weight whose panels alternate between gate and up."""
    return epilogue.endswith("_mul")


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    epilogue: str,
    activation: str = "none",
) -> Tensor:
    """epilogue(x @ weight.T + bias), in the weight's dtype and rounded once to that of x.

    weight: plain [out, in]; gate above up for a gated epilogue. activation: "int8" rounds x to 255
    steps a row first; its gradient passes through as if it did not.
    """
    if epilogue not in ACTIVATIONS:
        raise RuntimeError(f"linear: expected epilogue in {list(ACTIVATIONS)}, got {epilogue!r}")
    wide = torch.promote_types(weight.dtype, x.dtype)
    values = x.to(wide)
    if activation == "int8":
        values = values + (_rounded_to_int8(values) - values).detach()
    sums = F.linear(values, weight.to(wide), None if bias is None else bias.to(wide))
    if is_gated(epilogue):
        gate, up = sums.chunk(2, -1)
        result = ACTIVATIONS[epilogue](gate) * up
    else:
        result = ACTIVATIONS[epilogue](sums)
    if epilogue == "add":
        assert other is not None
        result = result + other.to(wide)
    return result.to(x.dtype)


def _rounded_to_int8(x: Tensor) -> Tensor:
    largest = x.abs().amax(-1, keepdim=True)
    # Multiplied before it is divided: kernels find the same neighbour where two are as near.
    codes = (127 * x / torch.where(largest > 0, largest, 1.0)).round()
    return codes * (largest / 127)


def dense_product(
    x: Tensor,
    panels: Tensor,
    out_features: int,
    bias: Tensor | None,
    other: Tensor | None,
    epilogue: str,
) -> Tensor:
    """The reference of linear_bf16, over packed tensors."""
    gated = is_gated(epilogue)
    rows = 2 * out_features if gated else out_features
    values = layout.unpack("bf16", panels, rows, x.shape[-1], gated)
    wide = torch.promote_types(x.dtype, torch.float32)
    return product(x, values.to(wide), bias, other, epilogue)


def codes_product(
    format: str,
    x: Tensor,
    panels: Tensor,
    channel_scales: Tensor,
    group_scales: Tensor | None,
    zero_points: Tensor | None,
    out_features: int,
    bias: Tensor | None,
    other: Tensor | None,
    epilogue: str,
    activation: str = "none",
) -> Tensor:
    """The reference of linear_int8 and linear_int4, over packed tensors."""
    gated = is_gated(epilogue)
    rows = 2 * out_features if gated else out_features
    codes = layout.unpack(format, panels, rows, x.shape[-1], gated)
    scales = layout.by_output(layout.joined_scales(channel_scales, group_scales), rows, gated)
    if zero_points is not None:
        zero_points = layout.by_output(zero_points.transpose(1, 2), rows, gated)
    weight = layout.values_of(format, codes, scales, zero_points)
    return product(x, weight, bias, other, epilogue, activation)


def nf4_product(
    x: Tensor,
    panels: Tensor,
    channel_scales: Tensor,
    group_scales: Tensor | None,
    out_features: int,
    bias: Tensor | None,
    other: Tensor | None,
    epilogue: str,
) -> Tensor:
    """The reference of linear_nf4."""
    return codes_product(
        "nf4", x, panels, channel_scales, group_scales, None, out_features, bias, other, epilogue
    )
