"""Products with the plain values of weights in panels, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

EPILOGUES: dict[str, Callable[[Tensor], Tensor]] = {
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
    activation_dtype: str = "none",
) -> Tensor:
    """epilogue(x @ weight.T + bias), in the weight's dtype and rounded once to that of x.

    weight: plain [out, in]; gate above up for a gated epilogue. activation_dtype: "int8" rounds x
    to 255 steps a row first; its gradient passes through as if it did not.
    """
    if epilogue not in EPILOGUES:
        raise RuntimeError(
            f"linear_panels: expected epilogue in {list(EPILOGUES)}, got {epilogue!r}"
        )
    wide = torch.promote_types(weight.dtype, x.dtype)
    values = x.to(wide)
    if activation_dtype == "int8":
        values = values + (_rounded_to_int8(values) - values).detach()
    sums = F.linear(values, weight.to(wide), None if bias is None else bias.to(wide))
    if is_gated(epilogue):
        gate, up = sums.chunk(2, -1)
        result = EPILOGUES[epilogue](gate) * up
    else:
        result = EPILOGUES[epilogue](sums)
    if epilogue == "add":
        assert other is not None
        result = result + other.to(wide)
    return result.to(x.dtype)


def _rounded_to_int8(x: Tensor) -> Tensor:
    largest = x.abs().amax(-1, keepdim=True)
    # Multiplied before it is divided: kernels find the same neighbour where two are as near.
    codes = (127 * x / torch.where(largest > 0, largest, 1.0)).round()
    return codes * (largest / 127)
