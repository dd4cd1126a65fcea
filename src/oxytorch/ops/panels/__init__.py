"""What the linear ops over packed weights share: the layout, the weight, one function for all."""

from __future__ import annotations

from torch import Tensor

from .._binding import entry
from .epilogues import is_gated
from .experts import Experts, moe
from .product import linear_product
from .weight import PanelWeight

__all__ = ["Experts", "PanelWeight", "linear", "moe"]


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
    if weight.is_gated is not is_gated(epilogue):
        wanted = "that ends in '_mul' for a gated weight" if weight.is_gated else "without '_mul'"
        raise ValueError(f"linear: expected an epilogue {wanted}, got {epilogue!r}")
    result: Tensor = _linear(
        x,
        weight.format,
        weight.packed,
        weight.channel_scales,
        weight.group_scales,
        weight.zero_points,
        weight.outputs,
        bias,
        other,
        epilogue,
        weight.activation or "none",
    )
    return result


_linear = entry("linear_panels", linear_product)
