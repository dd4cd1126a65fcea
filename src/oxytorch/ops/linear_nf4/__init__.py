"""Linear layer over a weight in panels of NF4 codes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._binding import entry
from .._op import Cost, Op, Sample, register
from .._panels.product import nf4_product
from .._panels.samples import code_calls, linear_cost


def linear_nf4(
    x: Tensor,
    panels: Tensor,
    channel_scales: Tensor,
    group_scales: Tensor | None,
    out_features: int,
    bias: Tensor | None = None,
    other: Tensor | None = None,
    epilogue: str = "none",
) -> Tensor:
    """Computes epilogue(x @ weight.T + bias) for a weight in panels.

    x: [..., in_features], float32, bfloat16 or float16; rows may be strided.
    panels: uint8, in the order that `oxytorch.ops._panels.layout` tells; `PanelWeight` makes it.
    channel_scales: float32 [panels, 16] or flat, times group_scales float16 [panels, groups, 16] if
    given; groups have 32, 64, 128 or 256 in_features. A weight is scale * value of the code.
    out_features: of the result. bias: [out_features], of x's dtype or float32.
    epilogue: "none", "gelu", "gelu_tanh", "silu", "relu"; "add" adds other [..., out_features];
    "silu_mul", "gelu_mul", "gelu_tanh_mul": panels alternate between gate and up, the activation of
    the gate's result multiplies the up's, and bias has both, gate before up.
    Returns [..., out_features] in x's dtype. Sums and epilogue are float32, rounded once; they do
    not depend on the number of threads. float64 and other devices run `reference`.
    Raises RuntimeError if a shape, dtype, device or name does not fit.
    Source of the values: Dettmers et al., QLoRA, 2023, appendix E.
    """
    result: Tensor = _call(
        x, panels, channel_scales, group_scales, out_features, bias, other, epilogue
    )
    return result


def reference(
    x: Tensor,
    panels: Tensor,
    channel_scales: Tensor,
    group_scales: Tensor | None,
    out_features: int,
    bias: Tensor | None = None,
    other: Tensor | None = None,
    epilogue: str = "none",
) -> Tensor:
    """The same in plain PyTorch."""
    return nf4_product(x, panels, channel_scales, group_scales, out_features, bias, other, epilogue)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    yield from code_calls("nf4", dtype, size)


def cost(
    x: Tensor,
    panels: Tensor,
    channel_scales: Tensor,
    group_scales: Tensor | None,
    out_features: int,
    bias: Tensor | None = None,
    other: Tensor | None = None,
    epilogue: str = "none",
) -> Cost:
    """Reads the weight and x, writes the result."""
    return linear_cost(
        x, [panels, channel_scales, group_scales, bias, other], out_features, epilogue
    )


_call = entry("linear_nf4", reference)

op = register(Op(linear_nf4, reference, samples, cost))
