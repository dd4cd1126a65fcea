"""Linear layer over a bfloat16 weight in panels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._binding import entry
from .._op import Cost, Op, Sample, register
from .._panels.product import dense_product
from .._panels.samples import dense_calls, linear_cost


def linear_bf16(
    x: Tensor,
    panels: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    other: Tensor | None = None,
    epilogue: str = "none",
) -> Tensor:
    """Computes epilogue(x @ weight.T + bias) for a weight in panels.

    x: [..., in_features], float32, bfloat16 or float16; rows may be strided.
    panels: uint8, in the order that `oxytorch.ops._panels.layout` tells; `PanelWeight` makes it.
    out_features: of the result. bias: [out_features], of x's dtype or float32.
    epilogue: "none", "gelu", "gelu_tanh", "silu", "relu"; "add" adds other [..., out_features];
    "silu_mul", "gelu_mul", "gelu_tanh_mul": panels alternate between gate and up, the activation of
    the gate's result multiplies the up's, and bias has both, gate before up.
    Returns [..., out_features] in x's dtype. Sums and epilogue are float32, rounded once; they do
    not depend on the number of threads. float64 and other devices run `reference`.
    Raises RuntimeError if a shape, dtype, device or name does not fit.
    """
    result: Tensor = _call(x, panels, out_features, bias, other, epilogue)
    return result


def reference(
    x: Tensor,
    panels: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    other: Tensor | None = None,
    epilogue: str = "none",
) -> Tensor:
    """The same in plain PyTorch."""
    return dense_product(x, panels, out_features, bias, other, epilogue)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    yield from dense_calls(dtype, size)


def cost(
    x: Tensor,
    panels: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    other: Tensor | None = None,
    epilogue: str = "none",
) -> Cost:
    """Reads the weight and x, writes the result."""
    return linear_cost(x, [panels, bias, other], out_features, epilogue)


_call = entry("linear_bf16", reference)

op = register(Op(linear_bf16, reference, samples, cost))
