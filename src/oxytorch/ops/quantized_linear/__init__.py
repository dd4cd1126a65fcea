"""Linear layer over a weight of bytes, whose input and result may be bytes too."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._binding import with_kernel
from .._op import Cost, Sample, nbytes, register
from .._quantized import NUMBERS, pack_weight, padded, result_of, sample_numbers
from .._quantized import steps_of_rows as steps_of_rows
from ..panels import layout
from ..panels.epilogues import ADDED

MOST_PRODUCTS = 65536
"""Products of bytes that a sum of 32 bits holds."""


def pack_linear(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Panels, channel_scales and channel_sums of a linear layer's weight, as the op takes them.

    weight: int8 [out_features, in_features].
    scales: float32 [out_features].
    """
    panels, sums = pack_weight(weight)
    return panels, padded(scales), sums


@with_kernel
def quantized_linear(
    x: Tensor,
    x_scale: float | None,
    x_zero_point: int,
    panels: Tensor,
    channel_scales: Tensor,
    channel_sums: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    other: Tensor | None = None,
    other_scale: float | None = None,
    other_zero_point: int = 0,
    epilogue: str = "none",
    out_dtype: str = "float32",
    out_scale: float | None = None,
    out_zero_point: int = 0,
) -> Tensor:
    """Computes epilogue(x @ weight.T + bias) for a weight of signed bytes and a scale per output.

    x: [..., in_features]; rows may be strided. int8 or uint8, of which x_scale * (byte -
        x_zero_point) is a number; or float32, bfloat16 or float16 with None and 0, whose rows are
        rounded to 255 steps of their largest magnitudes: rint(x * (127 / largest)).
    panels: uint8, channel_sums: int32 [16 panels], from `pack_linear` of an int8 weight
        [out_features, in_features] of at most 65536 in_features.
    channel_scales: float32 [16 panels].
    bias: float32 [out_features].
    other: [..., out_features] for the epilogues that add it, of any of these dtypes; bytes with
        other_scale and other_zero_point.
    epilogue: as in `linear_panels`, not a gated one.
    out_dtype: "float32", "bfloat16", "float16"; or "int8" or "uint8" with out_scale and
        out_zero_point.

    Returns [..., out_features]. Sums are exact; each float32 operation after them is rounded, the
    same at every level but for GELU, SiLU and their like. Bytes are nearest, ties to even, to the
    product with 1 / out_scale; NaN becomes the least. There is no gradient; float64 and other
    devices run plain PyTorch.
    Raises RuntimeError if a shape, dtype, device, scale or name does not fit.
    """
    stored = layout.unpack("int8", panels, out_features, x.shape[-1]).view(torch.int8)
    scales = channel_scales.flatten()[:out_features]
    if x_scale is None:
        whole, steps = steps_of_rows(x.to(torch.promote_types(x.dtype, scales.dtype)))
        sums = (whole.double() @ stored.double().T).to(scales.dtype) * steps.to(scales.dtype)
    else:
        scales = scales * x_scale
        sums = (x.double() - x_zero_point) @ stored.double().T
    return result_of(
        sums, scales, bias, other, other_scale, other_zero_point,
        epilogue, out_dtype, out_scale, out_zero_point,
    )  # fmt: skip


# rows, out_features, in_features, dtypes of x, other and out (None: the sample's), bias, epilogue
_CALLS: tuple[tuple[int, int, int, str | None, str | None, str | None, bool, str], ...] = (
    (1, 16, 64, "uint8", None, None, False, "none"),
    (1, 33, 70, None, None, None, True, "none"),
    (2, 40, 130, "int8", None, "int8", True, "relu"),
    (3, 17, 200, None, None, None, True, "gelu"),
    (4, 80, 256, "uint8", "uint8", "uint8", True, "add_relu"),
    (5, 20, 64, "int8", "int8", None, False, "add"),
    (6, 1, 37, None, None, "int8", True, "relu6"),
    (9, 96, 192, "uint8", None, None, True, "silu"),
    (16, 64, 128, "uint8", None, "int8", True, "none"),
    (17, 48, 1030, "int8", None, "uint8", True, "add"),
    (23, 81, 576, None, "int8", "uint8", True, "add_relu"),
    (33, 64, 64, "int8", None, None, True, "hardswish"),
    (50, 33, 320, "uint8", None, None, True, "add"),
    (300, 70, 64, "uint8", None, "uint8", True, "none"),
    (7, 90, 64, "uint8", "uint8", "uint8", True, "silu_add"),
    (40, 48, 128, None, None, None, False, "gelu_add"),
    (18, 33, 64, "int8", "int8", "uint8", True, "relu_add"),
    (0, 16, 64, "uint8", None, None, False, "none"),
)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    calls = _CALLS
    if size != "test":
        out, inputs = (512, 512) if size == "cache" else (16384, 8192)
        calls = ((1, out, inputs, "uint8", None, None, True, "none"),)
    for rows, out, inputs, x_dtype, other_dtype, out_dtype, has_bias, epilogue in calls:
        x = sample_numbers((rows, inputs), NUMBERS[x_dtype] if x_dtype else dtype)
        weight = torch.randint(-128, 128, (out, inputs), dtype=torch.int8, device="cpu")
        scales = padded((torch.rand(out, device="cpu") + 0.1) / 64 / inputs**0.5)
        panels, sums = pack_weight(weight)
        bias = torch.randn(out, device="cpu") if has_bias else None
        other: tuple[Tensor | None, float | None, int] = None, None, 0
        if epilogue in ADDED:
            other = sample_numbers((rows, out), NUMBERS[other_dtype] if other_dtype else dtype)
        name = out_dtype or str(dtype).removeprefix("torch.")
        result = (name, 1 / 32, -7 if name == "int8" else 100) if out_dtype else (name, None, 0)
        yield Sample(
            f"{rows}x{inputs}x{out}-{epilogue}-{x_dtype or 'dynamic'}-{out_dtype or 'floating'}",
            (*x, panels, scales, sums, out, bias, *other, epilogue, *result),
        )


def cost(x: Tensor, out_features: int, out_dtype: str, **rest: object) -> Cost:
    """Reads x and the weight's tensors, writes the result; and multiplies and adds."""
    rows = x.numel() // x.shape[-1]
    moved = x.nbytes + nbytes(rest) + rows * out_features * NUMBERS[out_dtype].itemsize
    return Cost(moved, 2 * rows * out_features * x.shape[-1])


op = register(quantized_linear, samples, cost, has_gradient=False)
