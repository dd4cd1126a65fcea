"""Products with the plain values of weights in panels, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .epilogues import ACTIVATIONS, ADDED, is_gated


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    epilogue: str,
    activation_dtype: str = "none",
) -> Tensor:
    """epilogue(x @ weight.T + bias), in the weight's dtype and rounded once to that of x.

    weight: plain [out, in]; gate above up for a gated epilogue.
    activation_dtype: "int8" rounds x to 255 steps a row first; its gradient passes through as if it
        did not.
    """
    if epilogue not in ACTIVATIONS:
        raise RuntimeError(
            f"linear_panels: expected epilogue in {list(ACTIVATIONS)}, got {epilogue!r}"
        )
    wide = torch.promote_types(weight.dtype, x.dtype)
    values = x.to(wide)
    if activation_dtype == "int8":
        values = in_255_steps(values)
    sums = F.linear(values, weight.to(wide), None if bias is None else bias.to(wide))
    if is_gated(epilogue):
        gate, up = sums.chunk(2, -1)
        result = ACTIVATIONS[epilogue](gate) * up
    else:
        result = ACTIVATIONS[epilogue](sums)
    if epilogue in ADDED:
        assert other is not None
        result = ADDED[epilogue](result + other.to(wide))
    return result.to(x.dtype)


def in_255_steps(x: Tensor) -> Tensor:
    """x, each row rounded to 255 steps; its gradient passes through as if it were not."""
    largest = x.abs().amax(-1, keepdim=True)
    # Multiplied before it is divided: kernels find the same neighbour where two are as near.
    codes = (127 * x / torch.where(largest > 0, largest, 1.0)).round()
    return x + (codes * (largest / 127) - x).detach()
