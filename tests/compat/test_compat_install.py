"""`install` is explicit, shown, taken back whole, and never in the predecessor's way."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from oxytorch import compat, info

OLD = "intel_extension_for_pytorch"


def state() -> tuple[Any, ...]:
    return (
        [*sys.meta_path],
        {name for name in dir(torch.xpu) if not name.startswith("__")},
        torch.jit.trace,
        torch.jit.freeze,
        torch.Tensor.numpy,
        "torch_ipex" in vars(torch.ops),
        {name for name in sys.modules if name.startswith(OLD)},
    )


def test_uninstall_takes_everything_back() -> None:
    before = state()
    assert info.collect()["compat"] == ""
    compat.install()
    compat.install()  # once more changes nothing
    try:
        assert "oxytorch.compat.ipex" in info.text(info.collect())
        assert callable(importlib.import_module(OLD).optimize)
        assert "ipex" in torch._dynamo.list_backends()
        assert callable(torch.ops.torch_ipex.split_float_bfloat16)
        assert torch.ones(2).bfloat16().numpy().dtype == "float32"
        assert torch.ones(2, dtype=torch.int16).numpy().dtype == "int16"
        assert torch.xpu.optimize is importlib.import_module(OLD).optimize  # type: ignore[attr-defined]
    finally:
        compat.uninstall()
    assert state() == before
    assert "ipex" not in torch._dynamo.list_backends()
    with pytest.raises(ImportError):
        importlib.import_module(OLD)
    compat.uninstall()  # once more changes nothing
    assert state() == before


def test_the_predecessor_itself_is_not_replaced_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{OLD}.py").write_text("is_real = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match="force=True"):
        compat.install()
    compat.install(force=True)
    try:
        assert not hasattr(importlib.import_module(OLD), "is_real")
    finally:
        compat.uninstall()
    assert importlib.import_module(OLD).is_real
    with pytest.raises(RuntimeError, match="already"):
        compat.install(force=True)
    del sys.modules[OLD]


def test_frozen_modules_of_optimized_models_are_optimized(installed: None) -> None:
    ipex = importlib.import_module(OLD)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).eval()
    x = torch.randn(4, 64)
    import oxytorch

    with torch.no_grad():
        fast = torch.jit.freeze(torch.jit.trace(ipex.optimize(model), x))
        torch.testing.assert_close(fast(x), model(x))
        assert oxytorch.explain(fast).entries
        ipex.enable_onednn_fusion(False)
        try:
            plain = torch.jit.freeze(torch.jit.trace(ipex.optimize(model), x))
        finally:
            ipex.enable_onednn_fusion(True)
        stock = torch.jit.freeze(torch.jit.trace(model, x))
    for each in (plain, stock):
        with pytest.raises(ValueError, match="not optimized"):
            oxytorch.explain(each)


def test_tracing_a_model_of_integers_says_what_to_do() -> None:
    from oxytorch.compat.ipex import quantization

    x = torch.randn(16, 64)
    prepared = quantization.prepare(
        torch.nn.Linear(64, 64).eval(), quantization.default_static_qconfig_mapping, x
    )
    with torch.no_grad():
        prepared(x)
        converted = quantization.convert(prepared)
        with pytest.warns(UserWarning, match="oxytorch.save"):
            traced = torch.jit.trace(converted, x, check_trace=False)
        torch.testing.assert_close(traced(x), prepared(x))
