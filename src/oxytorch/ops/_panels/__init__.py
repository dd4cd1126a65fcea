"""What the linear ops over packed weights share: the layout, the weight, one function for all."""

from __future__ import annotations

from torch import Tensor

from .product import product
from .rounding import nearest_codes
from .weight import PanelWeight

__all__ = ["PanelWeight", "linear", "nearest_codes"]


def linear(
    x: Tensor,
    weight: PanelWeight,
    bias: Tensor | None = None,
    *,
    epilogue: str = "none",
    other: Tensor | None = None,
) -> Tensor:
    """Computes epilogue(x @ weight.T + bias).

    x: [..., in_features], float32, bfloat16 or float16. bias: [out_features], of x's dtype or
    float32. epilogue: "none", "gelu", "gelu_tanh", "silu", "relu"; "add" adds other [..., out];
    "silu_mul", "gelu_mul" and "gelu_tanh_mul" want a weight made by `gated`, apply the activation
    to its upper half's result and multiply by the lower half's: [..., out_features / 2].
    Returns x's dtype. Sums and epilogue are float32, rounded once.
    """
    dense = weight.dense().float()
    return product(x, dense, bias, other, epilogue, weight.activation or "none")
