"""Routed experts over weights in panels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .._binding import entry
from .checks import check_alike
from .product import experts_product
from .weight import PanelWeight


@dataclass(frozen=True)
class Experts:
    """One kind of weight of all experts, taken apart once so that calls need not do it."""

    format: str
    shape: tuple[int, int]
    activation: str
    tensors: tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
    """Panels, channel scales, group scales and zero points; empty where there are none."""

    @classmethod
    def of(cls, weights: Sequence[PanelWeight]) -> Experts:
        """Takes weights of one shape, format and group size apart; nothing is copied."""
        if not weights:
            raise ValueError("moe: expected weights of at least one expert, got none")
        first = weights[0]
        check_alike("moe", weights, same_shape=True)
        names = ("packed", "channel_scales", "group_scales", "zero_points")
        lists = [
            [getattr(weight, name) for weight in weights if getattr(weight, name) is not None]
            for name in names
        ]
        shape = (first.shape[0], first.shape[1])
        return cls(
            first.format,
            shape,
            first.activation or "none",
            (lists[0], lists[1], lists[2], lists[3]),
        )


def moe(
    x: Tensor,
    router_weights: Tensor,
    router_indices: Tensor,
    gate_up: Sequence[PanelWeight] | Experts,
    down: Sequence[PanelWeight] | Experts,
    activation: str = "silu",
) -> Tensor:
    """Sums, over the experts that a token chose, router weight times expert(token).

    An expert is down(activation(gate(x)) * up(x)). x: [..., hidden], float32, bfloat16 or float16.
    router_weights: [tokens, chosen], of x's dtype or float32; router_indices: int64, likewise.
    gate_up: a weight [2 inner, hidden] made by `PanelWeight.gated` for each expert; down: a weight
    [hidden, inner]. `Experts.of` takes them apart once for many calls. activation: "silu", "gelu"
    or "gelu_tanh". Only weights of chosen experts are read. Returns x's shape and dtype.
    """
    first = gate_up if isinstance(gate_up, Experts) else Experts.of(gate_up)
    second = down if isinstance(down, Experts) else Experts.of(down)
    result: Tensor = _moe(
        x,
        router_weights,
        router_indices,
        first.format,
        *first.tensors,
        second.format,
        *second.tensors,
        first.shape[0] // 2,
        f"{activation}_mul",
        first.activation,
    )
    return result


_moe = entry("moe", experts_product)
