"""Which names the guard of a program looks at: those that a model can read, and no others."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch

layer = io.BytesIO()  # of the same name as an attribute of the model, which does not read it
last: Tensor | None = None


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x))


class Keeping(Named):
    def forward(self, x: Tensor) -> Tensor:
        global last
        last = x.sum()
        return torch.relu(self.layer(x))


class Asking(Named):
    def forward(self, x: Tensor) -> Tensor:
        if hasattr(torch, "_of_the_future"):
            return -self.layer(x)
        return torch.relu(self.layer(x))


def _program(model: nn.Module, x: Tensor) -> Any:
    return oxytorch.optimize(model.eval(), sample_input=x, passes=["program"])


def _has_program(model: nn.Module) -> bool:
    return "programs for" in str(oxytorch.explain(model))


def test_an_attribute_of_the_name_of_a_global_variable() -> None:
    x = torch.randn(4, 16)
    model = Named()
    assert _has_program(_program(model, x))
    oxytorch.quantize(model, [x])


def test_a_global_variable_that_is_only_written() -> None:
    x = torch.randn(4, 16)
    optimized = _program(Keeping(), x)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(4, 16)
            optimized(x)
            assert last is not None and torch.equal(last, x.sum())


def test_torch_imports_parts_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 16)
    model = Named()
    optimized = _program(model, x)
    with torch.no_grad():
        optimized(x)
        programs = optimized.forward.programs()
        monkeypatch.setattr(torch, "_a_part_of_itself", object(), raising=False)
        torch.testing.assert_close(optimized(x), model(x))
        assert programs and optimized.forward.programs() == programs


def test_code_that_asks_for_a_name_of_torch_sees_it_added(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 16)
    model = Asking()
    optimized = _program(model, x)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x))
        monkeypatch.setattr(torch, "_of_the_future", True, raising=False)
        for _ in range(4):
            torch.testing.assert_close(optimized(x), model(x))


def test_notes_of_the_exporter_on_an_input() -> None:
    x = torch.randn(4, 16)
    model = Named().eval()
    torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    torch._dynamo.mark_dynamic(x, 0)
    assert x.__dict__, "torch leaves no note any more: this test can go"
    assert _has_program(_program(model, x))
    x.mine = 3  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"attributes of its own \(mine\).*\.detach\(\)"):
        oxytorch.quantize(model, [x])
    oxytorch.quantize(model, [x.detach()])


def test_a_quantized_model_stays_quantized_under_inference_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval()
    quantized = oxytorch.quantize(model, [torch.randn(4, 8, 64) for _ in range(4)])
    x = torch.randn(4, 8, 64)
    with torch.inference_mode():
        first = quantized(x)
        for batch, length in [(2, 8), (5, 12), (3, 24), (6, 5)]:
            other = torch.randn(batch, length, 64)
            for _ in range(3):
                assert not torch.equal(quantized(other), model(other))
            torch.testing.assert_close(quantized(x), first, rtol=0, atol=0)


def test_a_dtype_without_the_pass_that_converts() -> None:
    x = torch.randn(4, 16)
    optimized = oxytorch.optimize(
        Named().eval(), sample_input=x, dtype=torch.bfloat16, passes=["program"]
    )
    text = str(oxytorch.explain(optimized))
    assert "dtypes as they are" in text and "dtype has no effect" in text
    assert optimized.layer.weight.dtype == torch.float32
