"""Gated recurrent unit layers whose weights are bytes, and whose products are of bytes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._binding import with_kernel
from .._op import Cost, Sample, register
from ..recurrent import cost_of, products_with, run_layers, sample_calls


@with_kernel
def quantized_gru(
    x: Tensor,
    h: Tensor | None,
    input_panels: Sequence[Tensor],
    input_scales: Sequence[Tensor],
    input_sums: Sequence[Tensor],
    hidden_panels: Sequence[Tensor],
    hidden_scales: Sequence[Tensor],
    hidden_sums: Sequence[Tensor],
    input_biases: Sequence[Tensor],
    hidden_biases: Sequence[Tensor],
    hidden_size: int,
    direction: str = "forward",
    batch_sizes: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs GRU layers over all steps, with weights and products of signed bytes.

    x: [steps, batch, features], or [rows, features] with batch_sizes; float32, bfloat16 or float16.
    h: the first state, [layers * directions, batch, hidden_size] of x's dtype; None: zeros.
    input_panels, hidden_panels: uint8, from `ops.recurrent.pack_weight` of int8 weights
        [3 * hidden_size, in_features]; a tensor for each direction of each layer, the first
        layer's first, as in all lists.
    input_scales, hidden_scales: float32, one for each output, in the order of
        `ops.recurrent.units_together`.
    input_sums, hidden_sums: int32, from `ops.recurrent.pack_weight`.
    input_biases, hidden_biases: as torch has them, [3 * hidden_size], float32, bfloat16 or
        float16; no tensor for no bias.
    direction: "forward", "reverse" or "both", whose outputs lie side by side.
    batch_sizes: of each step, not growing, as in torch's PackedSequence.

    Returns the hidden states of all steps, [..., directions * hidden_size], and the last h, in x's
    dtype. Rows of the input, and of the hidden state in each step, are rounded to 255 steps of
    their largest magnitudes, as in `quantized_linear`. Sums are exact; gates, states and what goes
    between layers are float32. There is no gradient. float64 and other devices run plain PyTorch.
    Formula: torch.nn.GRU's documentation.
    Raises RuntimeError if a shape, dtype, device or name does not fit.
    """
    given = input_panels, input_scales, input_biases
    own = hidden_panels, hidden_scales, hidden_biases
    products = products_with(given, own, 3, hidden_size)
    count = len(input_panels)
    output, (last,) = run_layers(
        x, [h], products, _cell, count, hidden_size, direction, batch_sizes
    )
    return output, last


def _cell(given: Tensor, hidden: Tensor, states: list[Tensor]) -> list[Tensor]:
    (r, z, n), (hidden_r, hidden_z, hidden_n) = given.chunk(3, -1), hidden.chunk(3, -1)
    reset, update = (r + hidden_r).sigmoid(), (z + hidden_z).sigmoid()
    fresh = (n + reset * hidden_n).tanh()
    return [fresh + update * (states[0] - fresh)]


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    return sample_calls("gru", inspect.unwrap(quantized_gru), dtype, size)


def cost(
    x: Tensor,
    h: Tensor | None,
    input_panels: Sequence[Tensor],
    hidden_panels: Sequence[Tensor],
    hidden_size: int,
    **rest: object,
) -> Cost:
    """Reads x, the states and all weights once, writes the outputs and the last states."""
    return cost_of(x, (h,), [*input_panels, *hidden_panels], hidden_size, rest)


op = register(quantized_gru, samples, cost, has_gradient=False)
