"""The operators that follow layers: six layers, all functions, each way in."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from seen import Seen
from torch import Tensor, nn
from torch.nn import functional as F

import oxytorch
from oxytorch.program.backend import compile_graph

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("everything_is_packed"),
]

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(8, 16, 3, padding=1), (2, 8, 10)),
    "conv2d": (lambda: nn.Conv2d(8, 16, 3, padding=1), (2, 8, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(8, 16, 3, padding=1), (1, 8, 4, 4, 4)),
    "linear": (lambda: nn.Linear(16, 16), (4, 16)),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(8, 16, 3), (2, 8, 5, 5)),
    "transposed conv3d": (lambda: nn.ConvTranspose3d(8, 16, 3), (1, 8, 3, 3, 3)),
}

Function = Callable[[Tensor], Tensor]
SWEPT: dict[str, Function] = {
    "gelu": F.gelu,
    "gelu by tanh": lambda y: F.gelu(y, approximate="tanh"),
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "sigmoid and mul": lambda y: y * torch.sigmoid(y),
}
"""Computed in the sweep of the layer."""
IN_PLACE: dict[str, Function] = {
    "abs": torch.abs,
    "exp": torch.exp,
    "hardsigmoid": F.hardsigmoid,
    "log": torch.log,
    "relu": F.relu,
    "round": torch.round,
    "sqrt": torch.sqrt,
}
"""Computed in the memory of the layer's result; ReLU in the sweep of our own layers."""
AFTER: dict[str, tuple[Function, list[str]]] = {
    "square": (torch.square, ["mul.Tensor"]),  # `square_` where torch leaves that operator
}
"""One operator of torch."""
WITH_NUMBERS: dict[str, Function] = {
    "leaky_relu": lambda y: F.leaky_relu(y, 0.1),
    "hardtanh": F.hardtanh,
    "clamp": lambda y: torch.clamp(y, -0.3, 0.4),
    "pow": lambda y: y.pow(3.0),
    "elu": F.elu,
    "mish": F.mish,
}
"""Our operator; torch's take numbers that a program cannot pass, or are slow."""
FUNCTIONS = (
    SWEPT | IN_PLACE | WITH_NUMBERS | {name: function for name, (function, _) in AFTER.items()}
)
CELLS = [*itertools.product(LAYERS, FUNCTIONS)]
_COPIES = ("contiguous", "unsqueeze", "squeeze.dim", "select.int", "view", "reshape")


class Layer(nn.Module):
    def __init__(self, layer: nn.Module, function: Function) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def _made(layer: str, function: str) -> tuple[Layer, Tensor]:
    make, size = LAYERS[layer]
    return Layer(make(), FUNCTIONS[function]).eval(), torch.randn(size)


def _after_layer(text: str) -> list[str]:
    """The operators of torch in a program, without those that only move elements."""
    targets = [line.split(" = ")[1].split()[0] for line in text.splitlines() if " = " in line]
    names = [each.removeprefix("aten::") for each in targets if each.startswith("aten::")]
    return [each for each in names if each not in _COPIES]


def _assert_joined(layer: str, function: str, text: str) -> None:
    found = _after_layer(text)
    if function in SWEPT:
        assert found == [], text
    elif function in WITH_NUMBERS:
        assert found == [] and text.count(" oxytorch::activation ") == 1, text
    elif function in AFTER:
        assert found in (AFTER[function][1], [f"{function}_"]), text
    elif function != "relu" or found:
        assert found == [f"{function}_"], text


def _same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("layer", "function"), CELLS)
def test_what_follows_is_joined_behind_torch_compile(layer: str, function: str, seen: Seen) -> None:
    model, x = _made(layer, function)
    _same(torch.compile(model, backend=compile_graph, fullgraph=True)(x), model(x))
    assert not seen.reasons
    _assert_joined(layer, function, seen.text)


@pytest.mark.parametrize(("layer", "function"), CELLS)
def test_what_follows_is_joined_in_exported_programs(layer: str, function: str) -> None:
    model, x = _made(layer, function)
    program = oxytorch.optimize(torch.export.export(model, (x,)))
    _same(program(x), model(x))
    _assert_joined(layer, function, program.program.text)


@pytest.mark.parametrize(("layer", "function"), CELLS)
def test_what_follows_is_joined_in_recordings(layer: str, function: str) -> None:
    model, x = _made(layer, function)
    optimized = oxytorch.optimize(model, sample_input=x, passes=["program"])
    _same(optimized(x), model(x))
    (program,) = optimized.forward.programs()
    _assert_joined(layer, function, str(program))


@pytest.mark.parametrize("function", WITH_NUMBERS)
@pytest.mark.parametrize("layer", LAYERS)
def test_numbers_are_passed_in_bfloat16(layer: str, function: str) -> None:
    model, x = _made(layer, function)
    model, x = model.bfloat16(), x.bfloat16()
    program = oxytorch.optimize(torch.export.export(model, (x,)))
    torch.testing.assert_close(program(x), model(x), rtol=0.02, atol=0.02)
    _assert_joined(layer, function, program.program.text)


@pytest.mark.parametrize("function", WITH_NUMBERS)
def test_numbers_are_passed_in_float64(function: str) -> None:
    model, x = _made("linear", function)
    model, x = model.double(), x.double()
    optimized = oxytorch.optimize(model, sample_input=x, passes=["program"])
    torch.testing.assert_close(optimized(x), model(x))
    assert "oxytorch::activation" not in str(optimized.forward.programs()[0])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_follows_is_joined_in_torchscript(function: str) -> None:
    """In the sweep of a linear layer in panels, else in the memory of the layer's result. Torch's
    operators with numbers stay, which TorchScript can pass."""
    for layer in LAYERS:
        model, x = _made(layer, function)
        optimized = oxytorch.optimize(torch.jit.trace(model, x), sample_input=x)
        _same(optimized(x), model(x))
        done = [entry.detail for entry in oxytorch.explain(optimized).applied]
        if function in SWEPT | IN_PLACE:
            name = {"gelu by tanh": "gelu", "sigmoid and mul": "silu"}.get(function, function)
            swept = {"gelu by tanh": "gelu_tanh"}.get(function, name)
            ways = f"{name} in place", f"linear + {swept}, weight in panels"
            assert any(way in done for way in ways), done


class Sum(Layer):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.function(self.layer(x) + other)


def _sum(layer: str, relu: bool) -> tuple[Sum, Tensor, Tensor]:
    model = Sum(LAYERS[layer][0](), F.relu if relu else lambda y: y).eval()
    x = torch.randn(LAYERS[layer][1])
    return model, x, torch.randn_like(model.layer(x))


def _assert_summed(layer: str, text: str) -> None:
    """A sum, and ReLU behind it, are computed by the layer: in the memory of the sum where that is
    oneDNN's."""
    is_apart = any(line.split(" = ")[-1].startswith("add ") for line in text.splitlines())
    assert is_apart is layer.startswith("transposed"), text


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("relu", [False, True])
def test_sums_are_in_the_sweep(layer: str, relu: bool, seen: Seen) -> None:
    model, x, other = _sum(layer, relu)
    run = torch.compile(model, backend=compile_graph, fullgraph=True)
    _same(run(x, other), model(x, other))
    _assert_summed(layer, seen.text)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("relu", [False, True])
def test_sums_are_in_the_sweep_of_other_ways_in(layer: str, relu: bool) -> None:
    model, x, other = _sum(layer, relu)
    expected = model(x, other)
    program = oxytorch.optimize(torch.export.export(model, (x, other)))
    _same(program(x, other), expected)
    _assert_summed(layer, program.program.text)
    recorded = oxytorch.optimize(model, sample_input=(x, other), passes=["program"])
    _same(recorded(x, other), expected)
    _assert_summed(layer, str(recorded.forward.programs()[0]))
    script = oxytorch.optimize(torch.jit.trace(model, (x, other)), sample_input=(x, other))
    _same(script(x, other), expected)


SPECIAL = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-30, -3.0, 3.0, -100.0, 100.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_special_values_are_those_of_torch(function: str, dtype: torch.dtype) -> None:
    """Behind a linear layer and a convolution, whose weights only pass on what they take."""
    rows = torch.tensor(SPECIAL, dtype=dtype)[:, None]
    layers = {"linear": nn.Linear(1, 16), "conv2d": nn.Conv2d(1, 16, 1)}
    for name, layer in layers.items():
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)
        model = Layer(layer, FUNCTIONS[function]).to(dtype).eval()
        x = rows if name == "linear" else rows[:, :, None, None]
        program = oxytorch.optimize(torch.export.export(model, (x,)))
        small = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
        torch.testing.assert_close(program(x), model(x), rtol=small, atol=small, equal_nan=True)
