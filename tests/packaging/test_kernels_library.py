"""liboxytorch_kernels.so: kernels over plain memory in a process without libtorch's help."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
import threading
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from oxytorch import _library

PATH = _library.PATH.parent / "liboxytorch_kernels.so"
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = [*CODES]

pytestmark = pytest.mark.skipif(not PATH.exists(), reason=f"no library {PATH}")


@cache
def _functions() -> Any:
    library = ctypes.CDLL(str(PATH))
    number, pointer, real, word = (
        ctypes.c_int64, ctypes.c_void_p, ctypes.c_double, ctypes.c_int,
    )  # fmt: skip
    for name, arguments in {
        "packed_bytes": [word, number, number],
        "pack": [word, pointer, number, number, pointer],
        "linear": [word, pointer, number, number, word, pointer, number, pointer,
                   ctypes.c_char_p, pointer, pointer],
        "layer_norm": [word, pointer, number, number, pointer, pointer, real, pointer],
        "rms_norm": [word, pointer, number, number, pointer, real, pointer],
        "softmax": [word, pointer, number, number, real, pointer],
        "attention": [word, pointer, pointer, pointer, *[number] * 5, real, word, pointer],
    }.items():  # fmt: skip
        getattr(library, f"oxytorch_kernels_{name}").argtypes = arguments
    library.oxytorch_kernels_packed_bytes.restype = number
    library.oxytorch_kernels_error.restype = ctypes.c_char_p
    library.oxytorch_kernels_level.restype = ctypes.c_char_p
    return library


def _call(name: str, *arguments: Any) -> str:
    """The error of a call, or an empty text."""
    words = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
    succeeded = getattr(_functions(), f"oxytorch_kernels_{name}")(*words)
    return "" if succeeded else str(_functions().oxytorch_kernels_error().decode())


def _packed(weight: Tensor) -> Tensor:
    code = CODES[weight.dtype]
    size = _functions().oxytorch_kernels_packed_bytes(code, *weight.shape)
    room = torch.empty(size + 64, dtype=torch.uint8)
    packed = room[-room.data_ptr() % 64 :][:size]
    assert _call("pack", code, weight, *weight.shape, packed) == ""
    return packed


def _close(found: Tensor, wanted: Tensor) -> None:
    allowed = ALLOWED[found.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 7, 40, 300])
def test_linear_agrees(dtype: torch.dtype, packed_dtype: torch.dtype, rows: int) -> None:
    weight = (torch.randn(150, 100) / 10).to(packed_dtype)
    x, bias, other = (torch.randn(*s).to(dtype) for s in ((rows, 100), (150,), (rows, 150)))
    packed, out = _packed(weight), torch.empty(rows, 150, dtype=dtype)
    exact = F.linear(x.double(), weight.double(), bias.double())
    for epilogue, wanted in ((None, exact), (b"relu", exact.relu()), (b"gelu", F.gelu(exact))):
        words = (CODES[dtype], x, rows, 100, CODES[packed_dtype], packed, 150, bias)
        assert _call("linear", *words, epilogue, None, out) == ""
        _close(out, wanted)
    assert _call("linear", *words, b"add", other, out) == ""
    _close(out, exact + other.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 17), (200, 768), (0, 4)])
def test_rows_agree(dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight, bias = (torch.randn(*s).to(dtype) for s in ((rows, width), (width,), (width,)))
    out, code, exact = torch.empty_like(x), CODES[dtype], x.double()
    assert _call("layer_norm", code, x, rows, width, weight, bias, 1e-5, out) == ""
    _close(out, F.layer_norm(exact, (width,), weight.double(), bias.double(), 1e-5))
    assert _call("rms_norm", code, x, rows, width, None, 1e-6, out) == ""
    _close(out, F.rms_norm(exact, (width,), None, 1e-6))
    assert _call("softmax", code, x, rows, width, 0.5, out) == ""
    _close(out, (exact * 0.5).softmax(-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_agrees(dtype: torch.dtype, is_causal: bool) -> None:
    shape = 2, 3, 33, 64
    q, k, v = (torch.randn(shape).to(dtype) for _ in range(3))
    out, scale = torch.empty(2, 33, 3, 64, dtype=dtype), 1 / math.sqrt(64)
    words = (CODES[dtype], q, k, v, 2, 3, 33, 33, 64, scale, int(is_causal), out)
    assert _call("attention", *words) == ""
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=is_causal)
    _close(out, wanted.transpose(1, 2))


def test_wrong_arguments_are_named() -> None:
    x, out = torch.randn(2, 4), torch.empty(2, 4)
    weight = _packed(torch.randn(4, 4))
    linear = (0, x, 2, 4, 0, weight, 4, None)
    for name, words, said in (
        ("layer_norm", (9, x, 2, 4, None, None, 1e-5, out), "expected a dtype of"),
        ("layer_norm", (0, None, 2, 4, None, None, 1e-5, out), "layer_norm: expected x that is"),
        ("layer_norm", (0, x, 2, 4, None, None, 1e-5, None), "expected out that is not null"),
        ("softmax", (0, x, -2, 4, 1.0, out), "expected sizes of x from 0 on"),
        ("rms_norm", (0, x, 1 << 40, 1 << 40, None, 1e-6, out), "that memory can hold"),
        ("linear", (*linear, b"nothing", None, out), "linear_panels: expected epilogue"),
        ("linear", (*linear, b"silu_mul", None, out), "linear_panels: expected"),
        ("linear", (*linear, b"add", None, out), "expected other with epilogue 'add'"),
        ("linear", (*linear, b"none", x, out), "expected other None with epilogue 'none'"),
        ("linear", (0, x, 2, 4, 0, weight[1:], 4, None, None, None, out), "a multiple of 64"),
        ("linear", (0, x, 2, 4, 2, weight, 4, None, None, None, out), "float32 or bfloat16"),
        ("pack", (0, x, 0, 4, weight), "expected out_features and in_features of at least 1"),
        ("pack", (0, x, 1 << 40, 1 << 40, weight), "packed_bytes: expected panels of fewer"),
        ("set_threads", (0,), "expected threads from 1 to 4096, got 0"),
    ):
        assert said in _call(name, *words), (name, words)


def test_threads_may_call_at_once() -> None:
    x = torch.randn(600, 512)
    wanted = x.double().softmax(-1)
    threads, errors = _functions().oxytorch_kernels_threads(), []
    assert _functions().oxytorch_kernels_abi() == 1

    def work() -> None:
        out = torch.empty_like(x)
        for _ in range(30):
            out.fill_(-1)
            if _call("softmax", 0, x, 600, 512, 1.0, out):
                errors.append("failed")
            if not torch.allclose(out.double(), wanted, atol=1e-6):
                errors.append("wrong")

    for count in (1, 2, 5):
        assert _call("set_threads", count) == ""
        callers = [threading.Thread(target=work) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert _call("set_threads", threads) == ""
    assert errors == []


def test_library_needs_no_torch_and_exports_its_own_names() -> None:
    readelf, nm = shutil.which("readelf"), shutil.which("nm")
    if readelf is None or nm is None:
        pytest.skip("readelf or nm is not installed")

    def lines(*command: str) -> list[str]:
        done = subprocess.run([*command, str(PATH)], check=True, capture_output=True, text=True)
        return done.stdout.splitlines()

    needed = [line.split("[")[1].rstrip("]") for line in lines(readelf, "-d") if "NEEDED" in line]
    assert needed and not any("torch" in name or "c10" in name for name in needed)
    names = {line.split()[-1] for line in lines(nm, "-D", "--defined-only")}
    assert names and all(name.startswith("oxytorch_kernels_") for name in names)
    assert PATH.stat().st_size < 12 << 20
