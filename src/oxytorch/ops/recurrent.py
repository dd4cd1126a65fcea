"""Recurrent layers whose weights are bytes, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ._op import Cost, Sample, nbytes
from ._quantized import steps_of_rows
from ._samples import values
from .panels import layout
from .panels.formats import FORMATS
from .quantize_weight import quantize_weight

GATES = {"lstm": 4, "gru": 3}
"""Of a unit: how many rows of a weight belong to it."""
LARGEST = 127
"""The largest magnitude of a weight's bytes."""


def units_together(rows: Tensor, gates: int) -> Tensor:
    """Rows [gates * hidden, ...] in the order of the ops: those of all gates of 16 hidden units,
    then those of the next 16, padded with zeros to [gates * hidden in whole sixteens, ...]."""
    hidden = rows.shape[0] // gates
    missing = -hidden % layout.OUTPUTS
    apart = torch.unflatten(rows, 0, (gates, hidden))
    padded = F.pad(apart, [*[0, 0] * (rows.dim() - 1), 0, missing])
    blocks = torch.unflatten(padded, 1, (-1, layout.OUTPUTS))
    return blocks.transpose(0, 1).flatten(0, 2)


def gates_together(rows: Tensor, gates: int, hidden: int) -> Tensor:
    """The inverse of `units_together`."""
    blocks = torch.unflatten(rows, 0, (-1, gates, layout.OUTPUTS))
    return blocks.transpose(0, 1).flatten(1, 2)[:, :hidden].flatten(0, 1)


def pack_weight(weight: Tensor, gates: int) -> tuple[Tensor, Tensor]:
    """Panels and sums of an int8 weight [gates * hidden, in_features], as the ops take them.

    Returns panels uint8 [panels, bytes of a panel] and sums int32 [16 panels].
    """
    rows = units_together(weight, gates).contiguous()
    return layout.pack("int8", rows.view(torch.uint8)), rows.sum(1, dtype=torch.int32)


def stored_weight(panels: Tensor, gates: int, hidden: int, in_features: int) -> Tensor:
    """The inverse of `pack_weight`: int8 [gates * hidden, in_features]."""
    outputs = gates * (hidden + -hidden % layout.OUTPUTS)
    rows = layout.unpack("int8", panels, outputs, in_features).view(torch.int8)
    return gates_together(rows, gates, hidden).contiguous()


def rounded_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The int8 numbers of a floating weight [outputs, in_features], and a float32 scale for each
    output, as `quantize_weight` finds them for "int8"."""
    codes, scales, _ = quantize_weight(weight, "int8")
    middle = FORMATS["int8"].middle
    assert middle is not None
    return (codes.short() - middle).to(torch.int8), scales[:, 0]


Product = Callable[[Tensor], Tensor]
"""Of rows, rounded to 255 steps each, with the weight of one direction."""


def product_with(
    panels: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    gates: int,
    hidden: int,
    in_features: int,
) -> Product:
    """The product of rows with a weight of bytes and a bias: [..., gates * hidden]."""
    stored = stored_weight(panels, gates, hidden, in_features)
    scale = gates_together(scales.flatten(), gates, hidden)

    def product(rows: Tensor) -> Tensor:
        wide = rows.to(torch.promote_types(rows.dtype, scale.dtype))
        whole, steps = steps_of_rows(wide)
        sums = (whole.double() @ stored.double().T).to(wide.dtype)
        result = sums * steps * scale
        return result if bias is None else result + bias.to(result.dtype)

    return product


Products = Callable[[int, int], tuple[Product, Product]]
"""Of the number of a direction of a layer and its in_features: with the weight of the input, and
with that of the hidden state."""
Weights = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]
"""Panels, scales and biases, each of all directions of all layers; biases may be none at all."""


def products_with(given: Weights, own: Weights, gates: int, hidden: int) -> Products:
    """given: of the input.
    own: of the hidden state.
    """

    def product(weights: Weights, number: int, in_features: int) -> Product:
        panels, scales, biases = weights
        bias = biases[number] if biases else None
        return product_with(panels[number], scales[number], bias, gates, hidden, in_features)

    return lambda number, width: (product(given, number, width), product(own, number, hidden))


Cell = Callable[[Tensor, Tensor, list[Tensor]], list[Tensor]]
"""The next states of the input's product, the hidden state's, and the states, hidden ones first."""


def run_layers(
    x: Tensor,
    given: Sequence[Tensor | None],
    products: Products,
    cell: Cell,
    count: int,
    hidden: int,
    direction: str,
    batch_sizes: Sequence[int] | None,
) -> tuple[Tensor, list[Tensor]]:
    """All layers over x [steps, batch, features], or [rows, features] with batch_sizes.

    given: the first states.
    count: of the directions of all layers.

    Returns the outputs and the last states, in x's dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    batch = x.shape[1] if batch_sizes is None else batch_sizes[0]
    zeros = x.new_zeros(count, batch, hidden, dtype=wide)
    first = [zeros if state is None else state.to(wide) for state in given]
    last: list[list[Tensor]] = []
    rows = x
    both = ("forward", "reverse") if direction == "both" else (direction,)
    for number in range(0, count, len(both)):
        found = []
        for place, way in enumerate(both, number):
            states = [state[place] for state in first]
            pair = products(place, rows.shape[-1])
            output, states = _run_direction(rows, states, *pair, cell, way, batch_sizes)
            found.append(output)
            last.append(states)
        rows = torch.cat(found, -1)
    return rows.to(x.dtype).contiguous(), [
        torch.stack(each).to(x.dtype) for each in zip(*last, strict=True)
    ]


def _run_direction(
    x: Tensor,
    states: list[Tensor],
    input_product: Product,
    hidden_product: Product,
    cell: Cell,
    way: str,
    batch_sizes: Sequence[int] | None,
) -> tuple[Tensor, list[Tensor]]:
    """The hidden states of all steps of a direction of a layer, and the last states."""
    inputs = input_product(x)
    parts = inputs.unbind() if batch_sizes is None else torch.split(inputs, [*batch_sizes])
    outputs: dict[int, Tensor] = {}
    for step in reversed(range(len(parts))) if way == "reverse" else range(len(parts)):
        rows = parts[step].shape[0]
        before = [state[:rows] for state in states]
        after = cell(parts[step], hidden_product(before[0]), before)
        outputs[step] = after[0]
        states = [torch.cat([new, old[rows:]]) for new, old in zip(after, states, strict=True)]
    if not parts:
        return x.new_empty(*x.shape[:-1], states[0].shape[-1], dtype=inputs.dtype), states
    ordered = [outputs[step] for step in range(len(parts))]
    return (torch.stack if batch_sizes is None else torch.cat)(ordered), states


def sample_weights(
    kind: str, layers: int, directions: int, in_features: int, hidden: int
) -> dict[str, list[Tensor]]:
    """Random weights for all directions of all layers, by the names of the ops' arguments."""
    found: dict[str, list[Tensor]] = {}
    gates = GATES[kind]
    for number in range(layers * directions):
        width = in_features if number < directions else directions * hidden
        for name, inputs in (("input", width), ("hidden", hidden)):
            plain = torch.randn(gates * hidden, inputs, device="cpu") / inputs**0.5
            stored, scales = rounded_weight(plain)
            panels, sums = pack_weight(stored, gates)
            made = (("panels", panels), ("scales", units_together(scales, gates)), ("sums", sums))
            for part, tensor in made:
                found.setdefault(f"{name}_{part}", []).append(tensor)
    for name in ("input_biases", "hidden_biases"):
        found[name] = [
            torch.randn(gates * hidden, device="cpu") / 4 for _ in range(layers * directions)
        ]
    return found


Shape = tuple[str, int, int, int, int, int, str, bool, list[int] | None]

TEST_SHAPES: tuple[Shape, ...] = (
    # name, steps, batch, in_features, hidden, layers, direction, state, batch sizes
    ("one", 1, 1, 16, 16, 1, "forward", False, None),
    ("odd", 4, 3, 7, 5, 1, "forward", True, None),
    ("wide", 3, 2, 70, 33, 1, "reverse", True, None),
    ("both", 3, 2, 20, 24, 2, "both", True, None),
    ("layers", 2, 1, 8, 64, 3, "forward", False, None),
    ("batch", 2, 23, 64, 48, 1, "forward", False, None),
    ("packed", 3, 4, 12, 16, 2, "both", True, [4, 2, 1]),
    ("ends", 4, 6, 40, 24, 1, "reverse", False, [6, 6, 5, 1]),
    ("no_sequence", 3, 0, 16, 16, 1, "forward", True, None),
)


_MARGIN = 5e-4
"""Of a step: by how much float32 may move what is rounded."""


class _Roundings(TorchFunctionMode):
    """Finds how near to the middle of two steps a number is that is rounded."""

    nearest: float = 0.5

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.round and args[0].numel():
            away = (args[0].abs() % 1 - 0.5).abs().nan_to_num(0.5)
            self.nearest = min(self.nearest, float(away.min()))
        return func(*args, **(kwargs or {}))


def _is_clear(reference: Callable[..., Any], args: Sequence[Any], rest: dict[str, Any]) -> bool:
    """Whether float32 and float64 round all numbers of a call to the same steps."""
    with torch.no_grad(), _Roundings() as roundings:
        reference(*args, **rest)
    return bool(roundings.nearest > _MARGIN)


def sample_calls(
    kind: str, reference: Callable[..., Any], dtype: torch.dtype, size: str
) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    if size != "test":
        width = 256 if size == "cache" else 2048
        shape = f"16x1x{width}", 16, 1, width, width, 1, "forward", False, None
        yield _sample(kind, dtype, *shape)
        return
    for given in TEST_SHAPES:
        sample = _sample(kind, dtype, *given)
        while not _is_clear(reference, sample.args, sample.kwargs):
            sample = _sample(kind, dtype, *given)
        yield sample


def _sample(
    kind: str,
    dtype: torch.dtype,
    name: str,
    steps: int,
    batch: int,
    in_features: int,
    hidden: int,
    layers: int,
    direction: str,
    has_state: bool,
    batch_sizes: list[int] | None,
) -> Sample:
    count = layers * (2 if direction == "both" else 1)
    rows = (steps, batch) if batch_sizes is None else (sum(batch_sizes),)
    states: list[Tensor | None] = [None] * (2 if kind == "lstm" else 1)
    if has_state:
        states = [values(count, batch, hidden, dtype=dtype) for _ in states]
    rest: dict[str, Any] = sample_weights(kind, layers, count // layers, in_features, hidden)
    rest.update(hidden_size=hidden, direction=direction, batch_sizes=batch_sizes)
    return Sample(name, (values(*rows, in_features, dtype=dtype), *states), rest)


def cost_of(
    x: Tensor,
    states: Sequence[Tensor | None],
    panels: Sequence[Tensor],
    hidden: int,
    rest: object,
) -> Cost:
    """Reads x, the states and all weights once, writes the outputs and the last states.

    panels: all of them.
    rest: what else is read.
    """
    rows = x.numel() // max(x.shape[-1], 1)
    directions = len(panels) // 2
    written = rows * hidden * x.dtype.itemsize
    products = sum(each.numel() for each in panels)
    return Cost(
        nbytes((x, *states, *panels, rest)) + nbytes([*states]) + written * min(directions, 2),
        2 * rows * products,
    )
