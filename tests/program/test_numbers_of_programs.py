"""Numbers beside tensors of all dtypes give in a program the dtype and values that torch gives."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from seen import Seen
from torch import Tensor, nn
from torch.nn import functional

import oxytorch
from oxytorch.program.replay import Replay

BOOL, FLOAT, LOW = torch.bool, torch.float32, torch.bfloat16
DTYPES = (BOOL, torch.uint8, torch.int8, torch.int64, torch.float16, LOW, FLOAT, torch.complex64)
NUMBERS: tuple[Any, ...] = (True, 2, 2.0, -1.5, 1 + 2j)


def _turned(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, n: function(n, x)


FUNCTIONS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    **{
        name: getattr(operator, name)
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "gt", "eq", "and_")
    },
    **{
        f"r{name}": _turned(getattr(operator, name))
        for name in ("sub", "truediv", "floordiv", "mod", "pow")
    },
    "squared": lambda x, n: x**2,
    "sum of tensors": lambda x, n: x + x * n,
    "difference from low": lambda x, n: x.to(torch.int64) - x.to(torch.uint8),
    "factor": lambda x, n: torch.add(x, n, alpha=2),
    "factor of tensors": lambda x, n: torch.add(x, x, alpha=2),
    "less with a factor": lambda x, n: torch.sub(x, n, alpha=3),
    "turned with a factor": lambda x, n: torch.rsub(x, n, alpha=2),
    "half of it": lambda x, n: torch.add(x, n, alpha=0.5),
    "clamp": lambda x, n: x.clamp(0, n),
    "masked_fill": lambda x, n: x.masked_fill(x != 0, n),
    "where number": lambda x, n: torch.where(x != 0, n, x),
    "where other number": lambda x, n: torch.where(x != 0, x, n),
    "where numbers": lambda x, n: torch.where(x != 0, n, 1),
    "where floats": lambda x, n: torch.where(x != 0, 1.0, n),
    "where one value": lambda x, n: torch.where(x != 0, n, torch.tensor(1.0, dtype=LOW)),
    "full": lambda x, n: torch.full((2, 6), n) + x,
    "full_like": lambda x, n: torch.full_like(x, n),
    "constant": lambda x, n: torch.tensor(n) * x,
    "scalar_tensor": lambda x, n: torch.scalar_tensor(n) + x,
    "one value": lambda x, n: x[0, 0] + n,
    "one value compared": lambda x, n: torch.where(x[0, 0] != 0, x[0, 0], n),
    "one value and a tensor": lambda x, n: x[0, 0] * n + x.to(LOW),
    "pad": lambda x, n: functional.pad(x, (1, 1), value=n),
    "copysign": torch.copysign,
    "xlogy": torch.xlogy,
    "product": lambda x, n: torch.baddbmm(x[None, :, :2], x[None], x[None, :, :2].mT @ x),
}
REFUSED_BY_FAKE_TENSORS = {(BOOL, "masked_fill", complex)}
"""What torch itself cannot export."""


def _values(dtype: torch.dtype) -> Tensor:
    given = torch.randint(-4, 5, (2, 6), generator=torch.Generator().manual_seed(0))
    if dtype == torch.uint8:
        return given.abs().to(dtype)
    return given > 0 if dtype == BOOL else given.to(dtype)


class Table(nn.Module):
    """All functions that torch has for a dtype, each with each number."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.cases = [
            (name, number)
            for name in FUNCTIONS
            for number in NUMBERS
            if (dtype, name, type(number)) not in REFUSED_BY_FAKE_TENSORS
            and self._has(name, _values(dtype), number)
        ]

    @staticmethod
    def _has(name: str, x: Tensor, number: Any) -> bool:
        if name == "pow" and x.dtype == BOOL and number is True:
            return False  # refused, by its name
        if isinstance(number, complex) and x.dtype == torch.float16:
            return False  # a program knows no complex32
        try:
            FUNCTIONS[name](x, number)
        except (RuntimeError, TypeError, NotImplementedError):
            return False
        return True

    def forward(self, x: Tensor) -> list[Tensor]:
        return [FUNCTIONS[name](x, number) for name, number in self.cases]


def _exported(model: nn.Module, x: Tensor, path: Path) -> Any:
    return oxytorch.optimize(torch.export.export(model, (x,)))


def _from_file(model: nn.Module, x: Tensor, path: Path) -> Any:
    oxytorch.save(_exported(model, x, path), path / "table.oxy")
    return oxytorch.load(path / "table.oxy")


def _recorded(model: nn.Module, x: Tensor, path: Path) -> Any:
    found = oxytorch.optimize(model, sample_input=x, graph=True)
    assert isinstance(found.__dict__.get("forward"), Replay), oxytorch.explain(found)
    return found


def _compiled(model: nn.Module, x: Tensor, path: Path) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="oxytorch", fullgraph=True)


WAYS = {"export": _exported, "file": _from_file, "recorded": _recorded, "compiled": _compiled}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_numbers_give_what_they_give_in_torch(
    dtype: torch.dtype, way: str, tmp_path: Path, seen: Seen, pack_small_layers: None
) -> None:
    model, x = Table(dtype).eval(), _values(dtype)
    wanted = model(x)
    with torch.no_grad():
        found = WAYS[way](model, x, tmp_path)(x)
    assert not seen.reasons
    assert len(model.cases) > 80
    tolerance = 1e-2 if dtype in (LOW, torch.float16) else 1e-5
    for case, one, other in zip(model.cases, found, wanted, strict=True):
        assert one.dtype == other.dtype, case
        assert one.shape == other.shape, case
        wide = torch.complex128 if one.is_complex() else torch.float64
        assert torch.allclose(
            one.to(wide), other.to(wide), rtol=tolerance, atol=1e-6, equal_nan=True
        ), case


def test_a_power_of_truth_values_is_refused_by_its_name() -> None:
    class Power(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x**True

    exported = torch.export.export(Power(), (_values(BOOL),))
    with pytest.raises(ValueError, match=r"pow\.Tensor_Scalar"):
        oxytorch.optimize(exported)
