"""Long short-term memory layer with weights packed once, computed by oneDNN inside torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...core.reordered import ReorderedTensor
from .._op import Cost, Sample, nbytes, register_onednn
from .._samples import values
from ..linear import supports

_GATES = 4
_LSTM_MODE = 2  # torch's number for LSTM in its rnn operators


class PackedLstmWeight(ReorderedTensor):
    """weight_ih [4 * hidden, input] or weight_hh [4 * hidden, hidden] in oneDNN's order.

    kind: "input" for weight_ih, "hidden" for weight_hh.
    reverse: of the backward direction.
    """

    kind: str = "input"
    reverse: bool = False
    has_bias: bool = True
    _shared_fields = ("kind", "reverse", "has_bias")

    def __new__(
        cls,
        weight: torch.Tensor,
        *,
        kind: str,
        reverse: bool,
        has_bias: bool,
        dtype: torch.dtype | None = None,
    ) -> PackedLstmWeight:
        if kind not in ("input", "hidden"):
            raise ValueError(f"PackedLstmWeight: expected kind 'input' or 'hidden', got {kind!r}")
        result = ReorderedTensor._wrap(cls, weight.shape, dtype or weight.dtype)
        result.kind, result.reverse, result.has_bias = kind, reverse, has_bias
        result.repack(weight)
        return result

    def _pack(self, stored: torch.Tensor) -> torch.Tensor:
        hidden = stored.shape[0] // _GATES
        other = stored.new_zeros(stored.shape[0], hidden)
        pair = (stored, other) if self.kind == "input" else (other, stored)
        both = torch.ops.mkldnn._reorder_mkldnn_rnn_layer_weight.default(
            *pair, hidden, self.reverse, self.has_bias, False, None
        )
        packed: torch.Tensor = both[0 if self.kind == "input" else 1]
        return packed

    def why_not_packed(self) -> str | None:
        return why_not_packed(self.dtype)

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        plain = packed.to_dense()  # [1, 1, input, gates, hidden]
        result: torch.Tensor = plain.squeeze(1).squeeze(0).permute(1, 2, 0).reshape(self.shape)
        return result.contiguous()


def why_not_packed(dtype: torch.dtype) -> str | None:
    """Return None where torch packs LSTM weights of this dtype on this CPU, else the reason."""
    return "LSTM: torch packs no float16" if dtype == torch.float16 else supports(dtype)


def lstm(
    x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None, module: nn.LSTM
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Run all layers and directions of an `nn.LSTM` whose weights are packed.

    x: [sequence, batch, input], or [batch, sequence, input] with batch_first, or without the batch
    dimension; state: (h, c), each [layers * directions, batch, hidden], zeros where None.
    Returns (output, (h, c)) as `nn.LSTM` does, in the weights' dtype. Inference only.
    Formula: torch.nn.LSTM's documentation (no projections, no peepholes).
    """
    parameters = module._parameters
    dtype = parameters["weight_ih_l0"].dtype  # type: ignore[union-attr]
    x = x.to(dtype)
    batched = x.dim() == 3
    if not batched:
        x = x.unsqueeze(0 if module.batch_first else 1)
    if module.batch_first:
        x = x.transpose(0, 1)
    directions = 2 if module.bidirectional else 1
    if state is None:
        h = c = x.new_zeros(module.num_layers * directions, x.shape[1], module.hidden_size)
    else:
        h, c = (s.to(dtype) if batched else s.to(dtype).unsqueeze(1) for s in state)
    h_out, c_out = [], []
    layer_input = x.contiguous()
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(directions):
            suffix = f"_l{layer}" + ("_reverse" if direction else "")
            row = layer * directions + direction
            out, h_n, c_n = _one(layer_input, h[row : row + 1], c[row : row + 1], module, suffix)
            outputs.append(out)
            h_out.append(h_n)
            c_out.append(c_n)
        layer_input = outputs[0] if directions == 1 else torch.cat(outputs, -1)
    output = layer_input.transpose(0, 1) if module.batch_first else layer_input
    h_n, c_n = torch.cat(h_out, 0), torch.cat(c_out, 0)
    if not batched:
        return output.squeeze(0 if module.batch_first else 1), (h_n.squeeze(1), c_n.squeeze(1))
    return output, (h_n, c_n)


def _one(
    x: torch.Tensor, h: torch.Tensor, c: torch.Tensor, module: nn.LSTM, suffix: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    parameters: Any = module._parameters
    weight_ih, weight_hh = parameters["weight_ih" + suffix], parameters["weight_hh" + suffix]
    if module.bias:
        biases = parameters["bias_ih" + suffix], parameters["bias_hh" + suffix]
    else:
        zeros = x.new_zeros(weight_ih.shape[0])
        biases = zeros, zeros
    out, h_n, c_n, _ = torch.ops.aten.mkldnn_rnn_layer.default(
        x, weight_ih.packed, weight_hh.packed, *biases, h.contiguous(), c.contiguous(),
        suffix.endswith("_reverse"), [], _LSTM_MODE, module.hidden_size, 1, module.bias,
        False, False, False,
    )  # fmt: skip
    shape = (1, x.shape[1], module.hidden_size)
    return out, h_n.reshape(shape), c_n.reshape(shape)


def _reference(
    x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None, module: nn.LSTM
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    weights = []
    for name in module._flat_weights_names:
        weight: Any = module._parameters[name]
        plain = weight.dense() if isinstance(weight, PackedLstmWeight) else weight.detach()
        weights.append(plain.to(x.dtype))
    if state is None:
        directions = 2 if module.bidirectional else 1
        batch = x.shape[0 if module.batch_first else 1]
        zeros = x.new_zeros(module.num_layers * directions, batch, module.hidden_size)
        state = zeros, zeros
    output, h, c = torch.lstm(
        x, state, weights, module.bias, module.num_layers, 0.0, False, module.bidirectional,
        module.batch_first,
    )  # fmt: skip
    return output, (h, c)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory"); none of dtypes without."""
    if why_not_packed(dtype) is not None:
        return
    if size != "test":
        width = 64 if size == "cache" else 1024
        x = values(20, 4, width, dtype=dtype)
        yield Sample(f"20x4x{width}", (x, None, packed_module(width, width, dtype)))
        return
    for options in ({}, {"num_layers": 2, "bidirectional": True}, {"bias": False}):
        name = "-".join(("5x3x7x8", *options))
        x = values(5, 3, 7, dtype=dtype)
        yield Sample(name, (x, None, packed_module(7, 8, dtype, **options)))
    state = values(1, 3, 8, dtype=dtype), values(1, 3, 8, dtype=dtype)
    module = packed_module(7, 8, dtype, batch_first=True)
    yield Sample("3x5x7x8-state", (values(3, 5, 7, dtype=dtype), state, module))


def packed_module(width: int, hidden: int, dtype: torch.dtype, **options: Any) -> nn.LSTM:
    """A layer with random weights, packed."""
    module = nn.LSTM(width, hidden, **options).to(dtype)
    for name, weight in list(module._parameters.items()):
        if weight is not None and name.startswith("weight"):
            kind = "input" if name.startswith("weight_ih") else "hidden"
            packed = PackedLstmWeight(
                weight.detach(), kind=kind, reverse=name.endswith("_reverse"), has_bias=module.bias
            )
            module._parameters[name] = nn.Parameter(packed, requires_grad=False)
    return module


def cost(x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None, module: nn.LSTM) -> Cost:
    """Reads x, state and weights, writes the result and the new state; two products a step."""
    steps = x.numel() // x.shape[-1]
    directions = 2 if module.bidirectional else 1
    weights = [p for n, p in module._parameters.items() if p is not None and "weight" in n]
    written = (steps + 2 * module.num_layers * x.shape[1]) * directions * module.hidden_size
    moved = nbytes((x, state, list(module._parameters.values()))) + written * x.dtype.itemsize
    return Cost(moved, 2 * steps * sum(weight.numel() for weight in weights))


op = register_onednn(lstm, _reference, samples, cost)
