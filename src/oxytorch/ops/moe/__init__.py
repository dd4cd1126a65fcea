"""Routed experts (a mixture of experts) over weights in panels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._autocast import Autocast
from .._binding import with_kernel
from .._op import Cost, Sample, nbytes, register
from .._samples import values
from ..linear_panels import op as linear_panels
from ..panels import PanelWeight
from ..panels.checks import check_alike
from ..panels.formats import FORMATS
from ..panels.samples import weight_of_codes


@with_kernel
def moe(
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
    activation_dtype: str = "none",
) -> Tensor:
    """Sums, over the experts that a token chose, router weight times expert(token).

    An expert is down(epilogue(gate_up(x))). `routed_mlp` takes `PanelWeight`s.
    x: [..., hidden], float32, bfloat16 or float16, with `tokens` rows.
    router_weights: [tokens, chosen], of x's dtype or float32.
    router_indices: int64, likewise.
    gate_up_format, down_format: "fp32", "bf16", "int8", "int4", "nf4" or "fp8". The lists have one
        tensor for each expert, in the form that linear_panels tells; scales are empty for fp32 and
        bf16, group_scales and zero_points where there are none. Panels of gate_up alternate between
        gate and up.
    inner_features: between gate_up and down.
    epilogue: "silu_mul", "gelu_mul" or "gelu_tanh_mul".
    activation_dtype: "int8" rounds what weights of 4 and 8 bits multiply to 255 steps a row.

    Returns x's shape and dtype; the results of gate_up are rounded to it too. Sums are float32 and
    do not depend on the number of threads. Only weights of chosen experts are read. float64 and
    other devices run plain PyTorch: every expert for every token, times its weight or zero.
    Raises RuntimeError if a shape, dtype, device, name or index does not fit.
    """
    tokens = x.reshape(-1, x.shape[-1])
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(tokens.shape, dtype=wide, device=x.device)
    scales = gate_up_channel_scales, gate_up_group_scales, gate_up_zero_points
    gate_up = gate_up_format, (gate_up_panels, *scales)
    down = down_format, (down_panels, down_channel_scales, down_group_scales, down_zero_points)
    for expert in range(len(gate_up_panels)):
        inner = _of_expert(gate_up, expert, tokens, inner_features, epilogue, activation_dtype)
        result = _of_expert(down, expert, inner, x.shape[-1], "none", activation_dtype).to(wide)
        chosen = router_indices == expert
        share = torch.where(chosen, router_weights.to(wide), 0.0).sum(-1, keepdim=True)
        total = total + torch.where(chosen.any(-1, keepdim=True), share * result, 0.0)
    return total.to(x.dtype).reshape(x.shape)


def _of_expert(
    weights: tuple[str, tuple[Sequence[Tensor], ...]],
    expert: int,
    x: Tensor,
    out_features: int,
    epilogue: str,
    activation_dtype: str,
) -> Tensor:
    format, lists = weights
    tensors = (each[expert] if each else None for each in lists)
    rounding = activation_dtype if FORMATS[format].middle is not None else "none"
    result: Tensor = linear_panels.reference(
        x, format, *tensors, out_features, None, None, epilogue, rounding
    )
    return result


@dataclass(frozen=True)
class Experts:
    """One kind of weight of all experts, taken apart once so that calls need not do it."""

    format: str
    shape: tuple[int, int]
    activation_dtype: str
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
            first.activation_dtype or "none",
            (lists[0], lists[1], lists[2], lists[3]),
        )


def routed_mlp(
    x: Tensor,
    router_weights: Tensor,
    router_indices: Tensor,
    gate_up: Sequence[PanelWeight] | Experts,
    down: Sequence[PanelWeight] | Experts,
    activation_fn: str = "silu",
) -> Tensor:
    """Sums, over the experts that a token chose, router weight times expert(token), as `moe` does.

    An expert is down(activation_fn(gate(x)) * up(x)).
    x, router_weights, router_indices: as in `moe`.
    gate_up: a weight [2 inner, hidden] made by `PanelWeight.gated` for each expert; down: a weight
    [hidden, inner]. `Experts.of` takes them apart once for many calls.
    activation_fn: "silu", "gelu" or "gelu_tanh".
    """
    first = gate_up if isinstance(gate_up, Experts) else Experts.of(gate_up)
    second = down if isinstance(down, Experts) else Experts.of(down)
    return moe(
        x,
        router_weights,
        router_indices,
        first.format,
        *first.tensors,
        second.format,
        *second.tensors,
        first.shape[0] // 2,
        f"{activation_fn}_mul",
        first.activation_dtype,
    )


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    if size != "test":
        # All experts for a token, so that their weights do not stay in a cache.
        chosen, hidden, inner = (2, 256, 512) if size == "cache" else (8, 4096, 1536)
        yield _sample(dtype, 1, chosen, 8, hidden, inner, "int4", 128, False, "silu_mul", "none")
        return
    calls: tuple[tuple[int, int, int, int, int, str, int | None, bool, str, str], ...] = (
        (1, 1, 2, 64, 48, "bf16", None, False, "silu_mul", "none"),
        (1, 3, 5, 96, 32, "int4", 32, True, "gelu_mul", "none"),
        (4, 2, 3, 40, 24, "int8", None, True, "gelu_tanh_mul", "none"),
        (7, 2, 3, 64, 48, "bf16", None, False, "silu_mul", "none"),
        (5, 2, 3, 96, 64, "int4", 32, True, "gelu_mul", "none"),
        (30, 2, 3, 128, 64, "nf4", 64, False, "silu_mul", "none"),
        (2, 2, 3, 128, 64, "fp8", 64, False, "silu_mul", "none"),
        (3, 2, 6, 128, 128, "int4", 128, False, "silu_mul", "int8"),
        (40, 1, 2, 192, 64, "int8", 64, False, "silu_mul", "int8"),
        (0, 2, 3, 64, 32, "int4", None, False, "silu_mul", "none"),
    )
    for call in calls:
        yield _sample(dtype, *call)


def cost(
    x: Tensor,
    router_weights: Tensor,
    router_indices: Tensor,
    inner_features: int,
    **rest: object,
) -> Cost:
    """Reads x and the chosen experts' weights, writes the result."""
    lists = [tensors for tensors in rest.values() if isinstance(tensors, (list, tuple))]
    chosen = set(router_indices.flatten().tolist())
    weights = nbytes([tensors[expert] for tensors in lists for expert in chosen if tensors])
    operations = 6 * router_indices.numel() * x.shape[-1] * inner_features
    return Cost(2 * x.nbytes + nbytes((router_weights, router_indices)) + weights, operations)


def _sample(
    dtype: torch.dtype,
    tokens: int,
    chosen: int,
    experts: int,
    hidden: int,
    inner: int,
    format: str,
    group_size: int | None,
    asymmetric: bool,
    epilogue: str,
    activation_dtype: str,
) -> Sample:
    def weight(out_features: int, in_features: int) -> PanelWeight:
        group = group_size if group_size and in_features % group_size == 0 else None
        return weight_of_codes(format, out_features, in_features, group, asymmetric)

    gates = [
        PanelWeight.gated(weight(inner, hidden), weight(inner, hidden)) for _ in range(experts)
    ]
    gate_up = Experts.of(gates)
    down = Experts.of([weight(hidden, inner) for _ in range(experts)])
    indices = torch.stack(
        [torch.randperm(experts, device="cpu")[:chosen] for _ in range(max(tokens, 1))]
    )
    return Sample(
        f"{tokens}x{chosen}-{experts}x{hidden}x{inner}-{format}-{epilogue}-{activation_dtype}",
        (
            values(tokens, hidden, dtype=dtype),
            torch.rand(tokens, chosen, device="cpu").to(dtype),
            indices[:tokens],
            format,
            *gate_up.tensors,
            format,
            *down.tensors,
            inner,
            epilogue,
            activation_dtype,
        ),
    )


op = register(moe, samples, cost, autocast=Autocast("lower", ("x", "router_weights")))
