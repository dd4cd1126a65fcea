"""Recurrent operators of torch in programs: what torch takes on trust is checked first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oxytorch.program.program import Program

LENGTH, BATCH, WIDTH, HIDDEN = 5, 3, 6, 4
LAYERS: dict[str, Callable[[], Any]] = {
    "lstm": lambda: nn.LSTM(WIDTH, HIDDEN),
    "lstm of 2 layers, both ways": lambda: nn.LSTM(WIDTH, HIDDEN, 2, bidirectional=True),
    "lstm without bias": lambda: nn.LSTM(WIDTH, HIDDEN, bias=False, batch_first=True),
    "lstm that projects": lambda: nn.LSTM(WIDTH, HIDDEN, 2, proj_size=2),
    "gru": lambda: nn.GRU(WIDTH, HIDDEN, 2),
    "gru both ways": lambda: nn.GRU(WIDTH, HIDDEN, bidirectional=True, batch_first=True),
    "rnn_tanh": lambda: nn.RNN(WIDTH, HIDDEN),
    "rnn_relu": lambda: nn.RNN(WIDTH, HIDDEN, nonlinearity="relu", bias=False),
}


def _program(layer: Any) -> tuple[Program, list[Tensor]]:
    """The layer's call, of whose tensors all are inputs, and these."""
    parts = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = (BATCH, LENGTH) if layer.batch_first else (LENGTH, BATCH)
    states = [torch.randn(parts, BATCH, getattr(layer, "proj_size", 0) or HIDDEN)]
    is_lstm = isinstance(layer, nn.LSTM)
    if is_lstm:
        states.append(torch.randn(parts, BATCH, HIDDEN))
    weights = [p.detach().clone() for p in layer.parameters()]
    numbers = [f"%{number}" for number in range(1 + len(states) + len(weights))]
    given = numbers[1 : 1 + len(states)]
    count = len(numbers)
    results = f"%{count} %{count + 1} _" if is_lstm else f"%{count} %{count + 1}"
    words = [
        f"inputs {count} 0 0\n{results} = aten::{layer.mode.lower()}.input %0",
        f"[ {' '.join(given)} ]" if is_lstm else given[0],
        f"[ {' '.join(numbers[1 + len(states) :])} ]",
        f"{str(layer.bias).lower()} {layer.num_layers} 0.0 false",
        f"{str(layer.bidirectional).lower()} {str(layer.batch_first).lower()}",
    ]
    text = " ".join(words) + f"\noutputs %{count} %{count + 1}"
    return Program(text, []), [torch.randn(*sizes, WIDTH), *states, *weights]


@pytest.mark.parametrize("name", LAYERS)
def test_calls_that_fit_are_torchs(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]().eval()
    program, given = _program(layer)
    with torch.no_grad():
        states = given[1:3] if isinstance(layer, nn.LSTM) else given[1]
        expected = layer(given[0], tuple(states) if isinstance(states, list) else states)[0]
    found, _ = program(given, [])
    torch.testing.assert_close(found[0], expected)


ALTERED: dict[str, Callable[[Tensor], Tensor]] = {
    "fewer rows": lambda t: t[:-1].clone(),
    "no rows": lambda t: t[:0].clone(),
    "fewer columns": lambda t: t[..., :-1].clone(),
    "no columns": lambda t: t[..., :0].clone(),
    "one dimension more": lambda t: t[None],
    "one dimension": lambda t: t.flatten(),
    "transposed": lambda t: t.transpose(0, -1).contiguous(),
}


def _without(shape: torch.Size, axis: int) -> list[int]:
    return [size for number, size in enumerate(shape) if number != axis]


@pytest.mark.parametrize("name", LAYERS)
def test_sizes_that_do_not_fit_are_refused(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]().eval()
    program, given = _program(layer)
    time_axis = 1 if layer.batch_first else 0
    for place, tensor in enumerate(given):
        for alter in ALTERED.values():
            altered = alter(tensor)
            if altered.shape == tensor.shape:
                continue
            changed = [*given[:place], altered, *given[place + 1 :]]
            if place == 0 and _without(altered.shape, time_axis) == _without(
                tensor.shape, time_axis
            ):
                continue  # another length
            with pytest.raises(RuntimeError, match=r"fails: .*[Ee]xpected"):
                program(changed, [])
