"""Wrong arguments of the ops on bytes: errors name the argument, the wanted and the given value."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from harness import CONVOLUTION

from marks import NEEDS_LIBRARY
from oxytorch import ops
from oxytorch.ops._quantized import pack_weight, random_bytes
from oxytorch.ops.quantized_convolution import pack_convolution

pytestmark = NEEDS_LIBRARY

X = random_bytes(2, 64, dtype=torch.uint8)
PANELS, SUMS = pack_weight(random_bytes(16, 64, dtype=torch.int8))
IMAGES = random_bytes(1, 4, 5, 5, dtype=torch.uint8)
KERNELS = pack_convolution(random_bytes(8, 4, 3, 3, dtype=torch.int8), torch.ones(8))


def linear(**changed: Any) -> torch.Tensor:
    """A linear layer of 16 outputs, but for what is changed."""
    arguments: dict[str, Any] = {
        "x": X,
        "x_scale": 0.1,
        "x_zero_point": 3,
        "panels": PANELS,
        "channel_scales": torch.ones(16),
        "channel_sums": SUMS,
        "out_features": 16,
    }
    return ops.quantized_linear(**arguments | changed)


def convolution(**changed: Any) -> torch.Tensor:
    """A convolution of 3 x 3 with 8 outputs, but for what is changed."""
    arguments: dict[str, Any] = {
        "x": IMAGES,
        "x_scale": 0.1,
        "x_zero_point": 3,
        "panels": KERNELS[0],
        "channel_scales": KERNELS[1],
        "channel_sums": KERNELS[2],
        **CONVOLUTION,
    }
    return ops.quantized_convolution(**arguments | changed)


INFINITY = float("inf")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": X.int()}, "x of dtype float32, bfloat16, float16, int8 or uint8, got int32"),
        ({"x": X[:, :0]}, "x with in_features, got [2, 0]"),
        ({"x_scale": None}, "x_scale a number for uint8, got None"),
        ({"x_scale": 0.0}, "x_scale from 2^-126 to 2^126, got 0.0"),
        ({"x_scale": -1.0}, "x_scale from 2^-126 to 2^126, got -1.0"),
        ({"x_scale": INFINITY}, "x_scale from 2^-126 to 2^126, got inf"),
        ({"x_scale": float("nan")}, "x_scale from 2^-126 to 2^126, got"),
        ({"x_zero_point": 256}, "x_zero_point from 0 to 255 for uint8, got 256"),
        ({"x": X.view(torch.int8), "x_zero_point": 128}, "x_zero_point from -128 to 127 for int8"),
        ({"x": X.float()}, "x_scale None for float32, got 0.1"),
        ({"x": X.float(), "x_scale": None}, "x_zero_point 0 for float32, got 3"),
        ({"panels": PANELS.flatten()[1:]}, "panels with 1024 elements, got [1023]"),
        ({"panels": PANELS.view(torch.int8)}, "panels of dtype uint8, got int8"),
        ({"channel_scales": torch.ones(15)}, "channel_scales with 16 elements, got [15]"),
        ({"channel_sums": SUMS.float()}, "channel_sums of dtype int32, got float32"),
        ({"out_features": 0}, "out_features of at least 1, got 0"),
        ({"out_features": 17}, "panels with 2048 elements"),
        (
            {"out_features": 1 << 62},
            "panels of fewer than 536870912 in_features and out_features",
        ),
        ({"bias": torch.ones(15)}, "bias with 16 elements, got [15]"),
        ({"bias": torch.ones(16).bfloat16()}, "bias of dtype float32, got bfloat16"),
        ({"epilogue": "selu"}, "epilogue 'none', 'gelu'"),
        ({"epilogue": "silu_mul"}, "epilogue that is not gated, got 'silu_mul'"),
        ({"epilogue": "add"}, "other with epilogue 'add', got None"),
        ({"other": torch.ones(2, 16)}, "other None with epilogue 'none', got [2, 16]"),
        (
            {"other": torch.ones(2, 15), "epilogue": "add"},
            "other of shape [2, 16], got [2, 15]",
        ),
        (
            {"other": torch.ones(2, 16).to(torch.int8), "epilogue": "add"},
            "other_scale a number for int8, got None",
        ),
        ({"other_scale": 1.0}, "other_scale None for float32, got 1.0"),
        (
            {"out_dtype": "int32"},
            "out_dtype float32, bfloat16, float16, int8 or uint8, got 'int32'",
        ),
        ({"out_dtype": "int8"}, "out_scale a number for int8, got None"),
        ({"out_scale": 1.0}, "out_scale None for float32, got 1.0"),
        ({"out_dtype": "int8", "out_scale": 1e-40}, "out_scale from 2^-126 to 2^126"),
        (
            {"out_dtype": "uint8", "out_scale": 1.0, "out_zero_point": -1},
            "out_zero_point from 0 to 255 for uint8, got -1",
        ),
    ],
)
def test_linear_refuses(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(f"quantized_linear: expected {message}")):
        linear(**changed)


def test_linear_refuses_sums_that_could_overflow() -> None:
    x = torch.zeros(1, 65537, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="expected x with at most 65536 in_features, got 65537"):
        linear(x=x)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": IMAGES.float()}, "x_scale None for float32, got 0.1"),
        ({"x": IMAGES[0, 0]}, "x of shape [images, channels, 1 to 3 spatial sizes], got [5, 5]"),
        (
            {"kernel_size": [65, 1], "padding": [65] * 4, "groups": 4, "out_channels": 4},
            "kernel_size of at most 64 lines for each channel by itself, got 65",
        ),
        (
            {"groups": 4, "out_channels": 4, "panels": KERNELS[0].flatten()[1:]},
            "panels with 1024 elements, got [1023]",
        ),
        ({"kernel_size": [3]}, "kernel_size of 2 numbers from 1 to 2^31 - 1, got [3]"),
        ({"kernel_size": [1 << 30, 1 << 30]}, "x that kernels of"),
        (
            {"kernel_size": [300, 300], "padding": [300] * 4},
            "kernel_size with at most 65536 products of a result, got more",
        ),
        ({"groups": 3}, "groups that divide the 4 channels of x, got 3"),
        ({"out_channels": 0}, "out_channels a multiple of groups"),
        ({"out_channels": 1 << 40}, "out_channels a multiple of groups, 1, below"),
        ({"panels": KERNELS[0].flatten()[64:]}, "panels with 1024 elements"),
        ({"bias": torch.ones(7)}, "bias with 8 elements, got [7]"),
        ({"other": torch.ones(1, 8, 3, 4), "epilogue": "add"}, "other of shape [1, 8, 3, 3]"),
    ],
)
def test_convolution_refuses(changed: dict[str, Any], message: str) -> None:
    wanted = re.escape(f"quantized_convolution: expected {message}")
    with pytest.raises(RuntimeError, match=wanted):
        convolution(**changed)


def test_convolution_refuses_floating_images() -> None:
    with pytest.raises(RuntimeError):
        convolution(x=IMAGES.float(), x_scale=None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, 0.1, 0, "int8"), "x of dtype float32, bfloat16 or float16 (or float64), got uint8"),
        ((X.float(), 0.0, 0, "int8"), "scale from 2^-126 to 2^126, got 0.0"),
        ((X.float(), 1.0, 200, "int8"), "zero_point from -128 to 127 for int8, got 200"),
        ((X.float(), 1.0, 0, "float32"), "dtype 'int8' or 'uint8', got 'float32'"),
    ],
)
def test_quantize_refuses(arguments: tuple[Any, ...], message: str) -> None:
    wanted = re.escape(f"quantize_per_tensor: expected {message}")
    with pytest.raises(RuntimeError, match=wanted):
        ops.quantize_per_tensor(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X.float(), 0.1, 0, "float32"), "x of dtype int8 or uint8, got float32"),
        ((X, 0.1, -1, "float32"), "zero_point from 0 to 255 for uint8, got -1"),
        ((X, 0.1, 0, "int8"), "dtype 'float32', 'bfloat16' or 'float16', got 'int8'"),
    ],
)
def test_dequantize_refuses(arguments: tuple[Any, ...], message: str) -> None:
    wanted = re.escape(f"dequantize_per_tensor: expected {message}")
    with pytest.raises(RuntimeError, match=wanted):
        ops.dequantize_per_tensor(*arguments)
