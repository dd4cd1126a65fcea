"""Linear layer over a weight in panels, of any format."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._autocast import Autocast
from .._binding import with_kernel
from .._op import Cost, Sample, nbytes, register
from ..panels import PanelWeight, layout
from ..panels.epilogues import is_gated
from ..panels.formats import FORMATS
from ..panels.product import product
from ..panels.samples import linear_calls


@with_kernel
def linear_panels(
    x: Tensor,
    format: str,
    panels: Tensor,
    channel_scales: Tensor | None,
    group_scales: Tensor | None,
    zero_points: Tensor | None,
    out_features: int,
    bias: Tensor | None = None,
    other: Tensor | None = None,
    epilogue: str = "none",
    activation_dtype: str = "none",
) -> Tensor:
    """Computes epilogue(x @ weight.T + bias) for a weight in panels; `linear` takes `PanelWeight`s.

    x: [..., in_features], float32, bfloat16 or float16; rows may be strided.
    format: "fp32", "bf16", "int8", "int4", "nf4" or "fp8".
    panels: uint8, in the order that `oxytorch.ops.panels.layout` tells; `PanelWeight` makes it.
    channel_scales: float32 [panels, 16] or flat, times group_scales float16 or float32 [panels,
        groups, 16] if given; groups have 32, 64, 128 or 256 in_features; None for fp32 and bf16.
    zero_points: uint8 [panels, groups, 16], or None: 128 for int8, 8 for int4. A weight is scale *
        (code - zero point), for nf4 and fp8 (E4M3) scale * value of the code.
    out_features: of the result.
    bias: [out_features], of x's dtype or float32.
    epilogue: "none", "gelu", "gelu_tanh", "silu", "relu", "tanh", "sigmoid", "hardswish", "relu6";
        "add" adds other [..., out_features], "add_relu" is the ReLU of that sum, "gelu_add" adds
        to an activation, as "silu_add" and so on do; "silu_mul",
        "gelu_mul", "gelu_tanh_mul": panels alternate between gate and up, the activation of the
        gate's result multiplies the up's, and bias has both, gate before up.
    activation_dtype: for int8 and int4. "int8" rounds x to 255 steps a row, dynamically; else
        bfloat16 x may be rounded to 15 bits of the largest magnitude of its group, or of 128
        neighbours.

    Returns [..., out_features] in x's dtype. Sums and epilogue are float32, rounded once; they do
    not depend on the number of threads. float64 and other devices run plain PyTorch.
    Raises RuntimeError if a shape, dtype, device or name does not fit. Source of NF4's values:
    Dettmers et al., QLoRA, 2023, appendix E.
    """
    gated = is_gated(epilogue)
    rows = 2 * out_features if gated else out_features
    stored = layout.unpack(format, panels, rows, x.shape[-1], gated)
    if channel_scales is None:
        weight = stored.to(torch.promote_types(x.dtype, torch.float32))
        return product(x, weight, bias, other, epilogue)
    scales = layout.by_output(layout.joined_scales(channel_scales, group_scales), rows, gated)
    if zero_points is not None:
        zero_points = layout.by_output(zero_points.transpose(1, 2), rows, gated)
    weight = layout.values_of(format, stored, scales, zero_points)
    return product(x, weight, bias, other, epilogue, activation_dtype)


def linear(
    x: Tensor,
    weight: PanelWeight,
    bias: Tensor | None = None,
    *,
    epilogue: str = "none",
    other: Tensor | None = None,
) -> Tensor:
    """Computes epilogue(x @ weight.T + bias), as `linear_panels` does with the weight's tensors.

    A gated weight, and no other, wants an epilogue that ends in "_mul". Whether x is rounded to
    8 bits is the weight's to say.
    """
    if weight.is_gated is not epilogue.endswith("_mul"):
        wanted = "that ends in '_mul' for a gated weight" if weight.is_gated else "without '_mul'"
        raise ValueError(f"linear: expected an epilogue {wanted}, got {epilogue!r}")
    activation_dtype = weight.activation_dtype or "none"
    return linear_panels(x, *weight.operands, bias, other, epilogue, activation_dtype)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory"), in every format."""
    for format in FORMATS:
        yield from linear_calls(format, dtype, size)
    for format in FORMATS if size == "test" else ():
        yield from linear_calls(format, dtype, size, sums=True)


def cost(x: Tensor, out_features: int, epilogue: str, **rest: object) -> Cost:
    """Reads x and the weight's tensors, writes the result; and multiplies and adds."""
    rows = x.numel() // x.shape[-1]
    moved = x.nbytes + nbytes(rest) + rows * out_features * x.dtype.itemsize
    outputs = out_features * (2 if is_gated(epilogue) else 1)
    return Cost(moved, 2 * rows * outputs * x.shape[-1])


op = register(linear_panels, samples, cost, autocast=Autocast("lower", ("x", "bias", "other")))
