"""Dynamo's graphs of inference become programs without torch's own tracing, where that is right."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oxytorch.program.backend import compile_graph

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

X = torch.linspace(-2, 2, 24).reshape(2, 3, 4)
_HELD = torch.linspace(0, 1, 4)


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.Hardtanh())
        self.register_buffer("shift", torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x) + self.shift, x, x[0]


def _of_torch(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why graphs were left to torch's tracing."""
    return [m for m in (r.getMessage() for r in caplog.records) if "is traced by torch" in m]


def _is_torchs(before: int) -> bool:
    return int(torch._dynamo.utils.counters["aot_autograd"]["total"]) > before


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend=compile_graph, fullgraph=True)  # type: ignore[no-any-return]


def _check(function: Callable[..., Any], *inputs: Tensor) -> bool:
    """Whether torch traced a function, whose values were compared."""
    before = int(torch._dynamo.utils.counters["aot_autograd"]["total"])
    compiled = _compiled(function)
    for _ in range(2):
        ours, theirs = ([each.clone() for each in inputs] for _ in range(2))
        torch.testing.assert_close(compiled(*ours), function(*theirs))
        torch.testing.assert_close(ours, theirs)
    return _is_torchs(before)


TRACED_HERE: dict[str, Callable[..., Any]] = {
    "linear layers": _Layers().eval(),
    "writes to what it made": lambda x: F.relu(x * 2, inplace=True) + 1,
    "a constant of Python": lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "a tensor of an enclosing function": lambda x: x + _HELD,
    "none and numbers": lambda x: (x + 1, None, 3, x.shape[0]),
    "autocast": lambda x: _under_autocast(x),
    "views of an input": lambda x: (x.transpose(0, 1), x[0], x),
    "smaller operators": lambda x: F.celu(x) + F.softplus(x) + x.std(-1, keepdim=True),
}


def _under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, torch.ones(4, 4))


@pytest.mark.parametrize("name", TRACED_HERE)
def test_traced_without_torch(name: str) -> None:
    with torch.no_grad():
        assert not _check(TRACED_HERE[name], X)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_in_which_nothing_asks_for_gradients(mode: Any) -> None:
    with mode():
        assert not _check(lambda x: F.gelu(x @ x.transpose(1, 2)), X)


def test_writes_to_inputs_are_left_to_torch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "oxytorch")
    with torch.no_grad():
        assert _check(lambda x: x.mul_(2) + 1, X)
    (why,) = _of_torch(caplog)
    assert "writes to an input" in why


def test_writes_that_show_elsewhere_are_left_to_torch() -> None:
    def function(x: Tensor) -> Any:
        made = x * 2
        part = made[0]
        part.add_(1)
        return made, part

    with torch.no_grad():
        assert _check(function, X)


def test_gradients_are_left_to_torch() -> None:
    model = _Layers().eval()
    before = int(torch._dynamo.utils.counters["aot_autograd"]["total"])
    found = _compiled(model)(X)[0]
    assert _is_torchs(before)
    found.sum().backward()
    assert model.layers[0].weight.grad is not None


def test_gradients_that_a_graph_turns_on_are_left_to_torch() -> None:
    weight = torch.ones(4, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x * weight

    with torch.no_grad():
        assert _compiled(function)(X).requires_grad == function(X).requires_grad


def test_random_numbers_are_those_of_torch() -> None:
    def function(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=True)

    with torch.no_grad():
        compiled = _compiled(function)
        compiled(X)
        torch.manual_seed(3)
        found = compiled(X)
        torch.manual_seed(3)
        torch.testing.assert_close(found, function(X))


def test_writes_to_weights_are_followed() -> None:
    model = _Layers().eval()
    with torch.no_grad():
        compiled = _compiled(model)
        compiled(X)
        for tensor in (model.layers[0].weight, model.shift):
            tensor.mul_(3)
            torch.testing.assert_close(compiled(X), model(X))
        model.layers[2].weight.data = torch.ones(4, 8)
        torch.testing.assert_close(compiled(X), model(X))


def test_what_is_seen_of_a_view_of_an_input_is_the_input() -> None:
    with torch.no_grad():
        given = X.clone()
        whole, part = _compiled(lambda x: (x, x[0]))(given)
        assert whole is given
        part.zero_()
    assert not given[0].any()


LEAN = """
import sys, torch
from oxytorch.program.backend import compile_graph
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval()
with torch.no_grad():
    torch.compile(model, backend="eager")(torch.randn(2, 8))
    torch._dynamo.reset()
    before = {*sys.modules}
    torch.compile(model, backend=compile_graph)(torch.randn(2, 8))
kinds = "torch._inductor", "functorch"
new = {name for name in {*sys.modules} - before if name.startswith(kinds)}
assert not new, new
"""


def test_nothing_of_torchs_compilers_is_imported() -> None:
    subprocess.run([sys.executable, "-c", LEAN], check=True)
