"""Infinities, NaN and signed zeros come out of programs where torch's own operators give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import oxytorch
from oxytorch.program.backend import compile_graph
from tiny import Formula

INF, NAN = float("inf"), float("nan")
X = torch.tensor([-INF, -4.0, -0.0, 0.0, 4.0, INF, NAN] * 5)
CASES: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"x ** {e}": lambda x, e=e: x**e for e in (0.5, -0.5, -1.0, -2.0, 1.5, 2.0, 3.0, -3.0, 0.0)},
    "elu, infinite": lambda x: F.elu(x, INF),
    "elu, NaN": lambda x: F.elu(x, NAN),
    "celu": lambda x: F.celu(x, 0.5),
    "leaky relu, infinite": lambda x: F.leaky_relu(x, INF),
    "hardtanh": lambda x: F.hardtanh(x, -2.0, 3.0),
    "clamp, turned": lambda x: torch.clamp(x, 3.0, -3.0),
    "threshold": lambda x: F.threshold(x, 0.0, -1.0),
    "softplus": lambda x: F.softplus(x, 2.0, 3.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_they_are_as_in_stock(name: str, dtype: torch.dtype) -> None:
    if dtype == torch.float64 and name.startswith("elu"):
        pytest.skip("torch's own smaller operators of elu, which float64 takes, are NaN at 0 there")
    torch._dynamo.reset()
    model, x = Formula(lambda x: CASES[name](x * 1.0)).eval(), X.to(dtype)
    with torch.no_grad():
        wanted = model(x)
        compiled: Any = torch.compile(model, backend=compile_graph)
        exported = torch.export.export(model, (torch.rand(len(x), dtype=dtype),))
        recorded = oxytorch.optimize(model, sample_input=x.abs(), passes=["program"])
        for run in (compiled, oxytorch.optimize(exported), recorded):
            found = run(x)
            torch.testing.assert_close(found, wanted, equal_nan=True)
            is_zero = wanted == 0
            assert torch.equal(found[is_zero].signbit(), wanted[is_zero].signbit())
