"""Recurrent layers of bytes: against torch's layers, and what they refuse."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from harness import LEVELS
from torch import Tensor, nn

from marks import NEEDS_LIBRARY
from oxytorch import isa, ops, testing
from oxytorch.ops import recurrent

pytestmark = NEEDS_LIBRARY

FUNCTIONS = {"lstm": ops.quantized_lstm, "gru": ops.quantized_gru}
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU}


def weights_of(kind: str, module: Any) -> dict[str, Any]:
    """The arguments that stand for the weights of a layer of torch."""
    gates, found = recurrent.GATES[kind], dict[str, Any]()
    ends = ("", "_reverse") if module.bidirectional else ("",)
    for suffix in (f"_l{layer}{end}" for layer in range(module.num_layers) for end in ends):
        own = {}
        for name, part in (("input", "ih"), ("hidden", "hh")):
            weight = getattr(module, f"weight_{part}{suffix}").detach()
            stored, scales = recurrent.rounded_weight(weight)
            panels, sums = recurrent.pack_weight(stored, gates)
            own[f"{name}_panels"], own[f"{name}_sums"] = panels, sums
            own[f"{name}_scales"] = recurrent.units_together(scales, gates)
            own[f"{name}_biases"] = getattr(module, f"bias_{part}{suffix}").detach()
        for name, tensor in own.items():
            found.setdefault(name, []).append(tensor)
    direction = "both" if module.bidirectional else "forward"
    return {**found, "hidden_size": module.hidden_size, "direction": direction}


def sqnr(actual: Tensor, wanted: Tensor) -> float:
    """Decibels by which squares exceed those of the error."""
    error = (actual - wanted).double().square().sum()
    return float(10 * torch.log10(wanted.double().square().sum() / error))


def run(kind: str, x: Tensor, states: Any, **arguments: Any) -> tuple[Tensor, ...]:
    """The op; states: as torch's layer takes them."""
    given = states if isinstance(states, tuple) else (states,)
    if states is None:
        given = (None,) * (2 if kind == "lstm" else 1)
    with torch.no_grad():
        return tuple(FUNCTIONS[kind](x, *given, **arguments))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("steps", "batch", "width", "hidden", "layers", "both"),
    [(9, 1, 24, 40, 1, False), (6, 5, 40, 72, 2, True), (5, 20, 64, 64, 2, False)],
)
def test_recurrent_layers_are_near_those_of_torch(
    kind: str, steps: int, batch: int, width: int, hidden: int, layers: int, both: bool
) -> None:
    torch.manual_seed(0)
    module = KINDS[kind](width, hidden, layers, bidirectional=both).eval()
    x = torch.randn(steps, batch, width)
    count = layers * (2 if both else 1)
    h, c = torch.randn(2, count, batch, hidden)
    states = (h, c) if kind == "lstm" else h
    with torch.no_grad():
        wanted, last = module(x, states)
    for level in LEVELS:
        with isa.use(level):
            output, *found = run(kind, x, states, **weights_of(kind, module))
        assert sqnr(output, wanted) > 35
        for actual, exact in zip(found, last if kind == "lstm" else (last,), strict=True):
            assert sqnr(actual, exact) > 35


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("both", [False, True])
def test_sequences_that_end_are_those_alone(kind: str, both: bool) -> None:
    torch.manual_seed(0)
    module = KINDS[kind](12, 20, 2, bidirectional=both).eval()
    lengths = [5, 3, 3, 1]
    parts = [torch.randn(length, 12) for length in lengths]
    packed = nn.utils.rnn.pack_sequence(parts)
    given = weights_of(kind, module)
    sizes = packed.batch_sizes.tolist()
    output, *last = run(kind, packed.data, None, **given, batch_sizes=sizes)
    found, _ = nn.utils.rnn.pad_packed_sequence(packed._replace(data=output))
    for number, part in enumerate(parts):
        alone, *last_alone = run(kind, part[:, None], None, **given)
        torch.testing.assert_close(found[: lengths[number], number], alone[:, 0], rtol=0, atol=1e-6)
        for actual, wanted in zip(last, last_alone, strict=True):
            torch.testing.assert_close(actual[:, number], wanted[:, 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", ["forward", "both"])
def test_steps_in_several_parts_are_the_same(kind: str, direction: str) -> None:
    """The products of the input of so many rows do not fit into the memory for them."""
    torch.manual_seed(0)
    given = recurrent.sample_weights(kind, 1, 2 if direction == "both" else 1, 8, 256)
    given |= {"hidden_size": 256, "direction": direction}
    x = torch.randn(24, 40, 8)
    output, *last = run(kind, x, None, **given)
    for number in (0, 39):
        alone, *last_alone = run(kind, x[:, number : number + 1], None, **given)
        torch.testing.assert_close(output[:, number], alone[:, 0], rtol=0, atol=1e-5)
        for actual, wanted in zip(last, last_alone, strict=True):
            torch.testing.assert_close(actual[:, number], wanted[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bit(kind: str) -> None:
    torch.manual_seed(0)
    given = recurrent.sample_weights(kind, 2, 2, 24, 200)
    given |= {"hidden_size": 200, "direction": "both"}
    before, found = torch.get_num_threads(), []
    for batch in (1, 30):
        x = torch.randn(7, batch, 24)
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                with testing.settings(split=True):
                    found.append(run(kind, x, None, **given))
        finally:
            torch.set_num_threads(before)
        for results in found[1:]:
            assert all(map(torch.equal, results, found[0]))
        found.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_in_its_sequence(kind: str) -> None:
    torch.manual_seed(0)
    given: Any = recurrent.sample_weights(kind, 1, 1, 16, 32) | {"hidden_size": 32}
    x = torch.randn(4, 3, 16)
    clean = run(kind, x, None, **given)[0]
    x[2, 1, 5] = float("nan")
    output = run(kind, x, None, **given)[0]
    assert output[2:, 1].isnan().all()
    torch.testing.assert_close(output[:, [0, 2]], clean[:, [0, 2]], rtol=0, atol=0)
    torch.testing.assert_close(output[:2], clean[:2], rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_leaves_the_states(kind: str) -> None:
    given: Any = recurrent.sample_weights(kind, 1, 1, 16, 32) | {"hidden_size": 32}
    h, c = torch.randn(2, 1, 3, 32)
    output, *last = run(kind, torch.randn(0, 3, 16), (h, c) if kind == "lstm" else h, **given)
    assert output.shape == (0, 3, 32)
    assert all(map(torch.equal, last, (h, c)))


X = torch.ones(2, 3, 16)
GIVEN = {kind: recurrent.sample_weights(kind, 1, 1, 16, 32) | {"hidden_size": 32} for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": X.int()}, "x of dtype float32, bfloat16 or float16 (or float64), got int32"),
        ({"x": X[0]}, "x of shape [steps, batch, features], got [3, 16]"),
        ({"batch_sizes": [3, 3]}, "x of shape [rows, features] with batch_sizes, got [2, 3, 16]"),
        ({"x": X[0], "batch_sizes": [1, 2]}, "batch_sizes of at least 1 that do not grow, got 2"),
        ({"x": X[0], "batch_sizes": [3, 0]}, "batch_sizes of at least 1 that do not grow, got 0"),
        ({"x": X[0], "batch_sizes": [4]}, "batch_sizes of at least 1 that do not grow, got 4"),
        ({"x": X[0], "batch_sizes": [2]}, "batch_sizes with a sum of 3, the rows of x, got 2"),
        ({"direction": "back"}, "direction 'forward', 'reverse' or 'both', got 'back'"),
        ({"direction": "both"}, "input_panels with two tensors for each layer, got 1"),
        ({"input_panels": []}, "input_panels with a tensor for each layer, got 0"),
        ({"hidden_sums": []}, "hidden_sums with 1 tensors, one for each direction of a layer"),
        ({"hidden_size": 0}, "hidden_size of at least 1, got 0"),
        ({"hidden_size": 33}, "input_panels with"),
        ({"h": X}, "h of shape [1, 3, 32], got [2, 3, 16]"),
        ({"h": torch.ones(1, 3, 32).double()}, "h of dtype float32, got float64"),
        ({"input_scales": [torch.ones(3)]}, "input_scales with"),
        ({"hidden_panels": [torch.ones(3)]}, "hidden_panels of dtype uint8, got float32"),
    ],
)
def test_recurrent_layers_refuse(kind: str, changed: dict[str, Any], message: str) -> None:
    states = {"h": None, "c": None} if kind == "lstm" else {"h": None}
    with pytest.raises(RuntimeError, match=re.escape(f"quantized_{kind}: expected {message}")):
        FUNCTIONS[kind](**{"x": X, **states, **GIVEN[kind], **changed})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["input_biases", "hidden_biases"])
def test_biases_are_named(kind: str, name: str) -> None:
    outputs = recurrent.GATES[kind] * 32
    states = {"h": None, "c": None} if kind == "lstm" else {"h": None}
    for biases, message in (
        ([torch.ones(3)], f"{name} of shape [{outputs}], got [3]"),
        ([torch.ones(outputs)] * 2, f"{name} with 1 tensors, one for each direction of a layer"),
        ([torch.ones(outputs).int()], f"{name} of dtype float32, bfloat16 or float16"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(f"quantized_{kind}: expected {message}")):
            FUNCTIONS[kind](X, **states, **GIVEN[kind] | {name: biases})


def test_cells_are_named() -> None:
    with pytest.raises(RuntimeError, match="quantized_lstm: expected c of shape"):
        ops.quantized_lstm(X, None, X, **GIVEN["lstm"])


@pytest.mark.parametrize("kind", KINDS)
def test_no_biases_are_zeros(kind: str) -> None:
    torch.manual_seed(0)
    given: Any = recurrent.sample_weights(kind, 2, 1, 16, 32) | {"hidden_size": 32}
    given["input_biases"] = [torch.zeros(recurrent.GATES[kind] * 32)] * 2
    given["hidden_biases"] = given["input_biases"]
    x = torch.randn(3, 2, 16)
    without = given | {"input_biases": [], "hidden_biases": []}
    assert all(map(torch.equal, run(kind, x, None, **given), run(kind, x, None, **without)))
