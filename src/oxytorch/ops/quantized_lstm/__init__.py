"""Long short-term memory layers whose weights are bytes, and whose products are of bytes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._binding import with_kernel
from .._op import Cost, Sample, register
from ..recurrent import cost_of, products_with, run_layers, sample_calls


@with_kernel
def quantized_lstm(
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs LSTM layers over all steps, with weights and products of signed bytes.

    x: [steps, batch, features], or [rows, features] with batch_sizes; float32, bfloat16 or float16.
    h, c: the first states, [layers * directions, batch, hidden_size] of x's dtype; None: zeros.
    input_panels, hidden_panels: uint8, from `ops.recurrent.pack_weight` of int8 weights
        [4 * hidden_size, in_features]; a tensor for each direction of each layer, the first
        layer's first, as in all lists.
    input_scales, hidden_scales: float32, one for each output, in the order of
        `ops.recurrent.units_together`.
    input_sums, hidden_sums: int32, from `ops.recurrent.pack_weight`.
    input_biases, hidden_biases: as torch has them, [4 * hidden_size], float32, bfloat16 or
        float16; no tensor for no bias.
    direction: "forward", "reverse" or "both", whose outputs lie side by side.
    batch_sizes: of each step, not growing, as in torch's PackedSequence.

    Returns the hidden states of all steps, [..., directions * hidden_size], and the last h and c,
    in x's dtype. Rows of the input, and of the hidden state in each step, are rounded to 255 steps
    of their largest magnitudes, as in `quantized_linear`. Sums are exact; gates, states and what
    goes between layers are float32. There is no gradient. float64 and other devices run plain
    PyTorch. Formula: torch.nn.LSTM's documentation, without projections.
    Raises RuntimeError if a shape, dtype, device or name does not fit.
    """
    given = input_panels, input_scales, input_biases
    own = hidden_panels, hidden_scales, hidden_biases
    products = products_with(given, own, 4, hidden_size)
    count = len(input_panels)
    output, (last_h, last_c) = run_layers(
        x, [h, c], products, _cell, count, hidden_size, direction, batch_sizes
    )
    return output, last_h, last_c


def _cell(given: Tensor, hidden: Tensor, states: list[Tensor]) -> list[Tensor]:
    i, f, g, o = (given + hidden).chunk(4, -1)
    kept = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    return [o.sigmoid() * kept.tanh(), kept]


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    return sample_calls("lstm", inspect.unwrap(quantized_lstm), dtype, size)


def cost(
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    input_panels: Sequence[Tensor],
    hidden_panels: Sequence[Tensor],
    hidden_size: int,
    **rest: object,
) -> Cost:
    """Reads x, the states and all weights once, writes the outputs and the last states."""
    return cost_of(x, (h, c), [*input_panels, *hidden_panels], hidden_size, rest)


op = register(quantized_lstm, samples, cost, has_gradient=False)
