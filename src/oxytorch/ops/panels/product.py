"""Products with packed weights in plain PyTorch: the reference of every linear op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from . import layout
from .epilogues import ACTIVATIONS, is_gated
from .formats import FORMATS


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


def linear_product(
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
    activation: str = "none",
) -> Tensor:
    """The reference of linear_panels."""
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
    return product(x, weight, bias, other, epilogue, activation)


def experts_product(
    x: Tensor,
    router_weights: Tensor,
    router_indices: Tensor,
    gate_up_format: str,
    gate_up_panels: Sequence[Tensor],
    gate_up_channel_scales: Sequence[Tensor],
    gate_up_group_scales: Sequence[Tensor],
    gate_up_zero_points: Sequence[Tensor],
    down_format: str,
    down_panels: Sequence[Tensor],
    down_channel_scales: Sequence[Tensor],
    down_group_scales: Sequence[Tensor],
    down_zero_points: Sequence[Tensor],
    inner_features: int,
    epilogue: str = "silu_mul",
    activation: str = "none",
) -> Tensor:
    """The reference of moe: every expert for every token, times its weight or zero."""
    tokens = x.reshape(-1, x.shape[-1])
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(tokens.shape, dtype=wide, device=x.device)
    gate_up = gate_up_panels, gate_up_channel_scales, gate_up_group_scales, gate_up_zero_points
    down = down_panels, down_channel_scales, down_group_scales, down_zero_points
    for expert in range(len(gate_up_panels)):
        inner = _expert_product(
            gate_up_format, tokens, gate_up, expert, inner_features, epilogue, activation
        )
        result = _expert_product(
            down_format, inner, down, expert, x.shape[-1], "none", activation
        ).to(wide)
        chosen = router_indices == expert
        share = torch.where(chosen, router_weights.to(wide), 0.0).sum(-1, keepdim=True)
        total = total + torch.where(chosen.any(-1, keepdim=True), share * result, 0.0)
    return total.to(x.dtype).reshape(x.shape)


def _expert_product(
    format: str,
    x: Tensor,
    lists: tuple[Sequence[Tensor], ...],
    expert: int,
    out_features: int,
    epilogue: str,
    activation: str,
) -> Tensor:
    panels, channel_scales, group_scales, zero_points = (
        tensors[expert] if tensors else None for tensors in lists
    )
    assert panels is not None
    rounds = activation if FORMATS[format].middle is not None else "none"
    parts = panels, channel_scales, group_scales, zero_points
    return linear_product(x, format, *parts, out_features, epilogue=epilogue, activation=rounds)
