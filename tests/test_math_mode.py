"""`fp32_math_mode("bf16")` rounds the factors of float32 products, and gives all back."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import oxytorch
from marks import NEEDS_LIBRARY
from oxytorch import _library, isa, ops
from oxytorch.ops.linear_panels import linear
from oxytorch.ops.panels import PanelWeight
from oxytorch.ops.quantize_weight import quantize_weight

# oneDNN multiplies float32 as it is where a processor has products of bfloat16 but no tiles.
ONEDNN_ROUNDS = torch.cpu._is_amx_tile_supported()
LEVELS = [level.name for level in isa.levels() if level.supported] if _library.loaded else []
needs_library = NEEDS_LIBRARY


def _settings() -> tuple[str, ...]:
    backends = torch.backends
    return (
        torch.get_float32_matmul_precision(),
        backends.mkldnn.matmul.fp32_precision,
        backends.mkldnn.conv.fp32_precision,
        backends.cuda.matmul.fp32_precision,
    )


def test_settings_of_torch_come_back() -> None:
    before = _settings()
    with oxytorch.fp32_math_mode("bf16"):
        assert oxytorch.get_fp32_math_mode() == "bf16"
        inside = _settings()
        assert inside[:2] == ("medium", "bf16")
        assert inside[2:] == before[2:]  # neither convolutions nor CUDA
        with oxytorch.fp32_math_mode("fp32"):
            assert _settings() == before
        assert _settings() == inside
    assert oxytorch.get_fp32_math_mode() == "fp32"
    assert _settings() == before


def test_setting_twice_is_as_once() -> None:
    before = _settings()
    oxytorch.set_fp32_math_mode("bf16")
    oxytorch.set_fp32_math_mode("bf16")
    oxytorch.set_fp32_math_mode("fp32")
    assert _settings() == before
    oxytorch.set_fp32_math_mode("fp32")
    assert _settings() == before


def test_settings_that_torch_refuses_to_tell_come_back() -> None:
    matmul = torch.backends.mkldnn.matmul
    matmul.fp32_precision = "bf16"
    try:
        with oxytorch.fp32_math_mode("bf16"):
            assert matmul.fp32_precision == "bf16"
        assert matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = "none"


def test_other_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 'fp32' or 'bf16', got 'tf32'"):
        oxytorch.set_fp32_math_mode("tf32")
    assert oxytorch.get_fp32_math_mode() == "fp32"


def test_mode_ends_with_an_error() -> None:
    with pytest.raises(KeyError), oxytorch.fp32_math_mode("bf16"):
        raise KeyError
    assert oxytorch.get_fp32_math_mode() == "fp32"


@pytest.mark.skipif(not ONEDNN_ROUNDS, reason="oneDNN rounds float32 with AMX only")
def test_products_of_torch_are_rounded_and_come_back() -> None:
    x, weight = torch.randn(64, 256), torch.randn(128, 256)
    plain = F.linear(x, weight)
    with oxytorch.fp32_math_mode("bf16"):
        rounded = F.linear(x, weight)
    assert rounded.dtype == torch.float32
    _is_product_of_bfloat16(rounded, x, weight)
    assert torch.equal(F.linear(x, weight), plain)


def _is_product_of_bfloat16(found: Tensor, x: Tensor, weight: Tensor) -> None:
    wide = x.double() @ weight.double().t()
    narrow = x.bfloat16().double() @ weight.bfloat16().double().t()
    # Sums are float32: the result is nearer to the product of rounded factors than rounding is.
    assert (found - narrow).abs().max() < 0.1 * (wide - narrow).abs().max()


def _packed(values: Tensor, format: str) -> PanelWeight:
    if format == "bf16":
        return PanelWeight.from_dense(values)
    return PanelWeight.from_codes(format, *quantize_weight(values, format), dtype=torch.float32)


def _rounds_in_panels() -> bool:
    return isa.has("tiles") or isa.has("fast_bf16_dot")


@needs_library
@pytest.mark.parametrize("format", ["bf16", "int8"])
@pytest.mark.parametrize("level", LEVELS)
def test_panels_multiply_bfloat16_where_it_gains(level: str, format: str) -> None:
    x = torch.randn(40, 192)
    packed = _packed(torch.randn(48, 192), format)
    weight = packed.restore()
    with isa.use(level):
        plain = linear(x, packed)
        with oxytorch.fp32_math_mode("bf16"):
            rounded = linear(x, packed)
            few = linear(x[:1], packed)
        again = linear(x, packed)
        assert torch.equal(again, plain)
        assert torch.equal(few, linear(x[:1], packed))  # memory decides there
        assert rounded.dtype == torch.float32
        if not _rounds_in_panels():
            assert torch.equal(rounded, plain)
            return
    assert not torch.equal(rounded, plain)
    exact = (x.bfloat16().double() @ weight.double().t()).float()
    torch.testing.assert_close(rounded, exact, atol=2e-3, rtol=1e-4)


@needs_library
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_attention_multiplies_bfloat16_where_it_gains(level: str, masked: bool) -> None:
    query, key, value = (torch.randn(2, 3, n, 40) for n in (70, 150, 150))
    mask = torch.rand(70, 150) > 0.3 if masked else None
    exact = F.scaled_dot_product_attention(*(t.double() for t in (query, key, value)), mask)
    with isa.use(level):
        plain = ops.attention(query, key, value, mask)
        with oxytorch.fp32_math_mode("bf16"):
            rounded = ops.attention(query, key, value, mask)
        assert torch.equal(ops.attention(query, key, value, mask), plain)
        assert rounded.dtype == torch.float32
        assert torch.equal(rounded, plain) is not isa.has("fast_bf16_dot")
    torch.testing.assert_close(rounded.double(), exact, atol=2e-2, rtol=2e-2)


@needs_library
def test_mode_holds_in_all_threads() -> None:
    found: list[tuple[str, int]] = []

    def look() -> None:
        mode = oxytorch.get_fp32_math_mode()
        found.append((mode, _library.functions().oxytorch_rounds_products()))

    with oxytorch.fp32_math_mode("bf16"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    look()
    assert found == [("bf16", 1), ("fp32", 0)]
