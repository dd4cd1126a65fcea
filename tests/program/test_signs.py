"""Tensors whose signs are turned when they are read (`conj`, `Tensor.is_neg`), in programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import oxytorch
from oxytorch.program.backend import compile_graph
from tiny import Formula

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda x: x.conj() * 2,
    "resolved": lambda x: (x.conj() * 2).resolve_conj(),
    "square": lambda x: (x * x.conj()).real,
    "exp": lambda x: x.conj().exp(),
    "imaginary": lambda x: x.conj().imag.exp(),
    "norm": lambda x: nn.functional.layer_norm(x.conj().imag, (64,)),
    "product": lambda x: x.conj().imag @ x.real.T,
    "convolved": lambda x: torch.fft.ifft(torch.fft.fft(x).conj() * torch.fft.fft(x)),
    "returned": lambda x: x.conj(),
}


def _inputs(rows: int) -> list[Tensor]:
    plain = torch.randn(rows, 64, dtype=torch.complex64)
    return [plain, torch.randn(rows, 64, dtype=torch.complex64).conj()]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(name: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    formula = CASES[name]
    compiled: Any = torch.compile(formula, backend=compile_graph, dynamic=dynamic)
    with torch.no_grad():
        for rows in (5, 5, 6, 7):
            for x in _inputs(rows):
                torch.testing.assert_close(compiled(x), formula(x))


@pytest.mark.parametrize("name", CASES)
def test_programs(name: str) -> None:
    formula = CASES[name]
    module = Formula(formula).eval()
    model = oxytorch.optimize(
        module, sample_input=_inputs(5)[0], graph=True, passes=["program"], inplace=False
    )
    with torch.no_grad():
        for rows in (5, 5, 6, 6, 7, 8):
            for x in _inputs(rows):
                torch.testing.assert_close(model(x), formula(x))


@pytest.mark.parametrize("name", ["scaled", "square", "exp", "convolved"])
def test_under_a_mode(name: str) -> None:
    """What a dispatch mode calls skips torch's turning of signs."""
    formula = CASES[name]
    x = _inputs(5)[0]
    exported = oxytorch.optimize(torch.export.export(Formula(formula).eval(), (x,)))
    with torch.no_grad(), FlopCounterMode(display=False):
        torch.testing.assert_close(exported(x), formula(x))


def _of_tangent() -> Tensor:
    """Zeros without memory, as forward-mode gradients hand out."""
    return torch._efficientzerotensor((5, 64))


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_zeros_without_memory(graph: bool, inplace: bool) -> None:
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).eval()
    x, zeros = torch.randn(5, 64), _of_tangent()
    with torch.no_grad():
        expected = model(zeros)
        ways: dict[str, Any] = {"graph": True} if graph else {"passes": ["program"]}
        optimized = oxytorch.optimize(model, sample_input=x, inplace=inplace, **ways)
        for given in (x, zeros, x, zeros):
            found = optimized(given)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_zeros_without_memory_compiled_and_loaded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).eval()
    x, zeros = torch.randn(5, 64), _of_tangent()
    oxytorch.save(model, tmp_path / "m.oxy", sample_input=x)
    with torch.no_grad():
        for form in (
            torch.compile(model, backend=compile_graph),
            oxytorch.load(tmp_path / "m.oxy"),
        ):
            form(x)
            torch.testing.assert_close(form(zeros), model(zeros), rtol=1e-5, atol=1e-5)
