"""Tensors whose signs are turned when they are read (`conj`, `Tensor.is_neg`), in programs."""

from __future__ import annotations

from collections.abc import Callable
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
