"""Passes over recurrent layers: their weights packed once, or of bytes.

A layer here is a step: a direction of one layer of an LSTM, as a recorded run has it, or all layers
and directions of an LSTM or GRU, as an exported program has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...ops import recurrent as ops
from ...ops.lstm import lstm, packed_module, why_not_packed
from ...ops.quantized_gru import quantized_gru
from ...ops.quantized_linear import MOST_PRODUCTS
from ...ops.quantized_lstm import quantized_lstm
from ...rewriting.measure import Calls, about, first_win, numbers
from ..program import Argument, Some, Step, Value
from .editor import Editor, known
from .quantized import name_of
from .quantized_layers import FLOATING, Quantization
from .quantized_weights import Making, bytes_of_recurrent

DIRECTION, LSTM, GRU = "aten::mkldnn_rnn_layer", "aten::lstm.input", "aten::gru.input"
PACK = "mkldnn::_reorder_mkldnn_rnn_layer_weight"
OF_BYTES = {"lstm": "oxytorch::quantized_lstm", "gru": "oxytorch::quantized_gru"}
_OF_LSTM = "2"
"""Torch's number of the kind of layer."""
USUAL = 16, 1
"""Steps and batch of an input whose size is not known."""
SLOWER = "floating point is as fast here"


@dataclass(frozen=True)
class Recurrent:
    """What a step computes.

    x: [steps, batch, features], or [batch, steps, features] if batch_first.
    states: h and, of an LSTM, c, each [batch, hidden] if is_one, else [directions of all layers,
        batch, hidden].
    weights: of each direction of a layer: input's, hidden state's, and two biases or none.
    direction: "forward", "reverse" or "both".
    """

    step: Step
    kind: str
    x: Value
    states: tuple[Value, ...]
    weights: tuple[tuple[Value, ...], ...]
    direction: str
    batch_first: bool
    is_one: bool

    @property
    def hidden(self) -> int:
        """Units of a direction."""
        meta: Any = self.weights[0][1].meta
        return int(meta.shape[1])

    @property
    def products(self) -> int:
        """That a call of it multiplies, 0 where sizes are not known."""
        meta: Any = self.x.meta
        size = known(meta.shape)
        rows = 0 if size is None else size[0] * size[1]
        each: list[Any] = [w.meta for weights in self.weights for w in weights[:2]]
        return rows * sum(int(meta.numel()) for meta in each)


def layers_of(editor: Editor, names: Mapping[Value, str]) -> Iterator[tuple[Recurrent, str, str]]:
    """The recurrent layers with the paths of their modules, which are one for all steps of a
    module, and why they cannot be of bytes."""
    for step in editor.steps.steps:
        found = _read(step)
        if found is None or editor.lasts(step):
            continue
        name = name_of(editor, names, found.weights[0][0])
        if name is not None:
            yield found, name, _why_not(editor, found)


def _read(step: Step) -> Recurrent | None:
    if step.target == DIRECTION:
        x, *weights, h, c, back, sizes, mode, _, _, biased, _, _, train = step.arguments
        if mode != _OF_LSTM or sizes or train != "false":
            return None
        parts = tuple(weights if biased == "true" else weights[:2])
        way = "reverse" if back == "true" else "forward"
        return Recurrent(step, "lstm", x, (h, c), (parts,), way, False, True)
    if step.target not in (LSTM, GRU):
        return None
    x, given, weights, biased, layers, _, train, both, batch_first = step.arguments
    if train != "false":
        return None
    kind = "lstm" if step.target == LSTM else "gru"
    count, way = (2, "both") if both == "true" else (1, "forward")
    each = 4 if biased == "true" else 2
    if len(weights) != each * count * int(layers):
        return None  # with projections
    groups = tuple(tuple(weights[i : i + each]) for i in range(0, len(weights), each))
    states = tuple(given) if kind == "lstm" else (given,)
    return Recurrent(step, kind, x, states, groups, way, batch_first == "true", False)


def _why_not(editor: Editor, layer: Recurrent) -> str:
    """Why a layer cannot be of bytes; empty if it can."""
    weights = [weight for group in layer.weights for weight in group]
    if not editor.lasting.issuperset(weights):
        return "its weight or bias is computed at each call"
    metas: list[Any] = [each.meta for each in (layer.x, *layer.states, *weights)]
    if None in metas or any(known(meta.shape) is None for meta in metas[1 + len(layer.states) :]):
        return "shapes of its input and weights are not known"
    x = metas[0]
    if any(meta.dtype != x.dtype for meta in metas) or x.dtype not in FLOATING:
        return f"its input is of {x.dtype}, or its weights are of another dtype"
    if x.dim() != 3 or any(0 in meta.shape for meta in metas):
        return "its input is a single sequence, or something is empty"
    multiplied: list[Any] = [weight.meta for group in layer.weights for weight in group[:2]]
    if max(meta.shape[1] for meta in multiplied) > MOST_PRODUCTS:
        return f"it sums more than {MOST_PRODUCTS} products"
    return ""


def quantize(editor: Editor, quantization: Quantization) -> None:
    """Have the layers that are named be of bytes, where they are faster so."""
    chosen: dict[str, list[Recurrent]] = {}
    for layer, name, why in layers_of(editor, quantization.names):
        if not why and name in quantization.layers.by_name:
            chosen.setdefault(name, []).append(layer)
    packed: dict[Value, list[Argument]] = {}
    for name, layers in chosen.items():
        if quantization.layers.only_faster and name not in quantization.pays:
            quantization.pays[name] = all(map(pays, layers))
        if quantization.layers.only_faster and not quantization.pays[name]:
            for layer in layers:
                editor.leave(layer.step, SLOWER)
            continue
        for layer in layers:
            make = Making(editor.steps.constants)
            made = of_bytes(layer, layer.step.results, make, packed)
            editor.replace(layer.step, *make.steps, *made)
    editor.apply()


def of_bytes(
    layer: Recurrent,
    results: Sequence[Value | None],
    make: Making,
    packed: dict[Value, list[Argument]],
) -> list[Step]:
    """The steps that compute a layer with bytes; make: gets what makes its weights.

    packed: the weights that were made before.
    """
    gates = ops.GATES[layer.kind]
    lists: list[list[Argument]] = [[] for _ in range(8)]
    for weights in layer.weights:
        for place, weight in enumerate(weights[:2]):
            if weight not in packed:
                packed[weight] = bytes_of_recurrent(make, weight, gates)
            for part, tensor in enumerate(packed[weight]):
                lists[3 * place + part].append(tensor)
        for place, bias in enumerate(weights[2:]):
            lists[6 + place].append(bias)
    steps: list[Step] = []
    x, states = layer.x, list(layer.states)
    if layer.batch_first:
        x = _turned(x, steps)
    if layer.is_one:
        states = [_viewed("aten::unsqueeze", state, steps) for state in states]
    given = [Some(state) for state in states]
    outputs, *last = results[: 1 + len(states)]
    inner = Value() if layer.batch_first and outputs is not None else outputs
    ends = [Value() if layer.is_one and value is not None else value for value in last]
    size = [str(layer.hidden), f'"{layer.direction}"', "none"]
    steps.append(Step(OF_BYTES[layer.kind], [x, *given, *lists, *size], [inner, *ends]))
    if inner is not outputs:
        steps.append(Step("aten::transpose.int", [inner, "0", "1"], [outputs], is_view=True))
    if layer.is_one:
        pairs = zip(ends, last, strict=True)
        steps += [
            Step("aten::select.int", [end, "0", "0"], [value], is_view=True)
            for end, value in pairs
            if end is not None
        ]
    return steps


def _turned(x: Value, steps: list[Step]) -> Value:
    result = Value(meta=None if x.meta is None else x.meta.transpose(0, 1))
    steps.append(Step("aten::transpose.int", [x, "0", "1"], [result], is_view=True))
    return result


def _viewed(target: str, value: Value, steps: list[Step]) -> Value:
    result = Value(meta=None if value.meta is None else value.meta.unsqueeze(0))
    steps.append(Step(target, [value, "0"], [result], is_view=True))
    return result


def pays(layer: Recurrent) -> bool:
    """Whether a layer of bytes is faster than the packed floating one, or torch's own."""
    meta: Any = layer.x.meta
    size = known(meta.shape)
    width, dtype = int(meta.shape[-1]), meta.dtype
    steps, batch = USUAL if size is None else size[:2]
    if layer.batch_first and size is not None:
        steps, batch = batch, steps
    directions = 2 if layer.direction == "both" else 1
    layers, has_bias = len(layer.weights) // directions, len(layer.weights[0]) > 2
    form = layer.hidden, layers, directions, has_bias, dtype, about(steps), about(batch)

    def calls() -> Calls:
        x = numbers(steps, batch, width).to(dtype)
        options: dict[str, Any] = {
            "num_layers": layers, "bidirectional": directions == 2, "bias": has_bias,
        }  # fmt: skip
        floating = floating_call(layer.kind, width, layer.hidden, dtype, options)
        ours = call_of_bytes(layer.kind, width, layer.hidden, layers, directions)
        return lambda: floating(x), lambda: ours(x)

    key = ("recurrent step of bytes", layer.kind, about(width), form)
    return first_win(key, [_made_once(calls)]) == 0


def _made_once(make: Callable[[], Calls]) -> Calls:
    made: list[Calls] = []

    def one(place: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            if not made:
                made.append(make())
            return made[0][place]()

        return run

    return one(0), one(1)


def floating_call(
    kind: str, width: int, hidden: int, dtype: torch.dtype, options: Mapping[str, Any]
) -> Callable[[Tensor], Tensor]:
    """A floating layer of such sizes, packed where it can be, with random weights."""
    if kind == "lstm" and why_not_packed(dtype) is None:
        packed = packed_module(width, hidden, dtype, **options)
        return lambda x: lstm(x, None, packed)[0]
    own: Any = nn.LSTM if kind == "lstm" else nn.GRU
    module = own(width, hidden, **options).to(dtype)
    return lambda x: module(x)[0]


def call_of_bytes(
    kind: str, width: int, hidden: int, layers: int, directions: int
) -> Callable[[Tensor], Tensor]:
    """A layer of bytes of such sizes, with random weights."""
    given: dict[str, Any] = ops.sample_weights(kind, layers, directions, width, hidden)
    given |= {"hidden_size": hidden, "direction": "both" if directions == 2 else "forward"}
    if kind == "lstm":
        return lambda x: quantized_lstm(x, None, None, **given)[0]
    return lambda x: quantized_gru(x, None, **given)[0]


def pack(editor: Editor) -> None:
    """Have floating LSTMs take weights in oneDNN's order, which it would else make at each call."""
    for step in editor.steps.steps:
        layer = _read(step) if step.target == DIRECTION else None
        if layer is None:
            continue
        (weights,) = layer.weights
        why = "its weight is computed at each call"
        if editor.lasting.issuperset(weights[:2]):
            dtype = None if weights[0].meta is None else weights[0].meta.dtype
            why = why_not_packed(dtype) or "" if dtype is not None else "its dtype is not known"
        if why:
            editor.leave(step, why)
            continue
        x, _, _, *rest = step.arguments
        back, has_bias, batch_first = rest[4], rest[9], rest[11]
        packed = [Value(), Value()]
        arguments = [*weights[:2], str(layer.hidden), back, has_bias, batch_first, "none"]
        making = Step(PACK, arguments, packed, returns_list=True)
        editor.replace(step, making, step.with_arguments([x, *packed, *rest]))
    editor.apply()
