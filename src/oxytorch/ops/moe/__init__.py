"""Routed experts (a mixture of experts) over weights in panels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._binding import entry
from .._op import Cost, Op, Sample, register
from .._samples import values
from ..panels.experts import Experts
from ..panels.product import experts_product
from ..panels.samples import weight_of_codes
from ..panels.weight import PanelWeight


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
    activation: str = "none",
) -> Tensor:
    """Sums, over the experts that a token chose, router weight times expert(token).

    An expert is down(epilogue(gate_up(x))). `oxytorch.ops.panels.moe` takes `PanelWeight`s.
    x: [..., hidden], float32, bfloat16 or float16, with `tokens` rows.
    router_weights: [tokens, chosen], of x's dtype or float32. router_indices: int64, likewise.
    gate_up_format, down_format: "bf16", "int8", "int4" or "nf4". The lists have one tensor for each
    expert, in the form that linear_panels tells; scales are empty for bf16, group_scales and
    zero_points where there are none. Panels of gate_up alternate between gate and up.
    inner_features: between gate_up and down. epilogue: "silu_mul", "gelu_mul" or "gelu_tanh_mul".
    activation: "int8" rounds what codes of 4 and 8 bits multiply to 255 steps a row.
    Returns x's shape and dtype; the results of gate_up are rounded to it too. Sums are float32 and
    do not depend on the number of threads. Only weights of chosen experts are read.
    float64 and other devices run `reference`.
    Raises RuntimeError if a shape, dtype, device, name or index does not fit.
    """
    result: Tensor = _call(
        x,
        router_weights,
        router_indices,
        gate_up_format,
        list(gate_up_panels),
        list(gate_up_channel_scales),
        list(gate_up_group_scales),
        list(gate_up_zero_points),
        down_format,
        list(down_panels),
        list(down_channel_scales),
        list(down_group_scales),
        list(down_zero_points),
        inner_features,
        epilogue,
        activation,
    )
    return result


reference = experts_product


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
) -> Cost:
    """Reads x and the chosen experts' weights, writes the result."""
    lists = (
        gate_up_panels,
        gate_up_channel_scales,
        gate_up_group_scales,
        gate_up_zero_points,
        down_panels,
        down_channel_scales,
        down_group_scales,
        down_zero_points,
    )
    chosen = set(router_indices.flatten().tolist())
    weights = sum(tensors[expert].nbytes for tensors in lists for expert in chosen if tensors)
    operations = 6 * router_indices.numel() * x.shape[-1] * inner_features
    return Cost(2 * x.nbytes + router_weights.nbytes + router_indices.nbytes + weights, operations)


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
    activation: str,
) -> Sample:
    def weight(out_features: int, in_features: int) -> PanelWeight:
        group = group_size if group_size and in_features % group_size == 0 else None
        return weight_of_codes(format, out_features, in_features, group, asymmetric)

    gates = [
        PanelWeight.gated(weight(inner, hidden), weight(inner, hidden)) for _ in range(experts)
    ]
    gate_up = Experts.of(gates)
    down = Experts.of([weight(hidden, inner) for _ in range(experts)])
    indices = torch.stack([torch.randperm(experts)[:chosen] for _ in range(max(tokens, 1))])
    return Sample(
        f"{tokens}x{chosen}-{experts}x{hidden}x{inner}-{format}-{epilogue}-{activation}",
        (
            values(tokens, hidden, dtype=dtype),
            torch.rand(tokens, chosen).to(dtype),
            indices[:tokens],
            format,
            *gate_up.tensors,
            format,
            *down.tensors,
            inner,
            epilogue,
            activation,
        ),
    )


_call = entry("moe", reference)

op = register(Op(moe, reference, samples, cost))
