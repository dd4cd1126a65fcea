"""Sample calls of the ops over panels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._op import Sample
from .._samples import values
from .epilogues import ADDED, is_gated
from .formats import FORMATS
from .weight import PanelWeight

# rows, out_features, in_features, group_size, asymmetric, bias, epilogue, activation_dtype
_CALLS: tuple[tuple[int, int, int, int | None, bool, bool, str, str], ...] = (
    (1, 16, 64, None, False, False, "none", "none"),
    (1, 33, 96, 32, True, True, "none", "none"),
    (2, 40, 128, 64, False, True, "add", "none"),
    (3, 17, 200, None, True, False, "gelu", "none"),
    (4, 48, 256, 128, True, False, "silu_mul", "none"),
    (5, 20, 256, 64, False, True, "gelu_tanh_mul", "none"),
    (6, 1, 37, None, False, True, "gelu_mul", "none"),
    (7, 32, 512, 256, True, True, "gelu_tanh", "none"),
    (8, 31, 130, None, False, False, "silu", "none"),
    (9, 64, 160, 32, True, True, "relu", "none"),
    (23, 80, 576, 64, False, True, "silu_mul", "none"),
    (0, 16, 64, None, False, False, "none", "none"),
    (1, 33, 300, None, False, True, "none", "int8"),
    (3, 40, 256, 128, True, False, "add", "int8"),
    (12, 48, 192, 64, False, True, "gelu_mul", "int8"),
    (4, 20, 64, None, False, True, "sigmoid", "none"),
    (10, 33, 64, None, False, True, "tanh", "none"),
    (14, 16, 70, None, False, False, "hardswish", "none"),
)
_SUMS: tuple[tuple[int, int, int, int | None, bool, bool, str, str], ...] = (
    (11, 20, 64, None, False, True, "relu6", "none"),
    (2, 33, 128, None, False, True, "add_relu", "none"),
    (13, 40, 70, None, False, True, "add_relu", "none"),
    (5, 50, 96, None, False, True, "silu_add", "none"),
    (12, 33, 64, None, False, True, "gelu_tanh_add", "none"),
    (1, 24, 130, None, False, False, "hardswish_add", "none"),
)

# Those that one format is enough to try.
_RARE = ("sigmoid", "tanh", "hardswish", "relu6", "gelu_tanh_add", "hardswish_add")


def linear_calls(
    format: str, dtype: torch.dtype, size: str, sums: bool = False
) -> Iterator[Sample]:
    """Sample calls of linear_panels in one format; `sums`: those of the last epilogues."""
    for name, x, weight, out_features, extras in _calls(format, dtype, size, sums):
        tensors = weight.packed, weight.channel_scales, weight.group_scales, weight.zero_points
        yield Sample(f"{format}-{name}", (x, format, *tensors, out_features, *extras))


def _calls(
    format: str, dtype: torch.dtype, size: str, sums: bool
) -> Iterator[tuple[str, Tensor, PanelWeight, int, tuple[object, ...]]]:
    if size != "test":
        out, inputs = (512, 512) if size == "cache" else (16384, 8192)
        weight = weight_of_codes(
            format, out, inputs, 128 if FORMATS[format].has_codes else None, False
        )
        yield f"1x{inputs}x{out}", values(1, inputs, dtype=dtype), weight, out, ()
        return
    for rows, out, inputs, group, asymmetric, has_bias, epilogue, activation_dtype in (
        _SUMS if sums else _CALLS
    ):
        if activation_dtype == "int8" and FORMATS[format].middle is None:
            continue
        if epilogue in _RARE and format != "fp32":
            continue
        width = 2 * out if is_gated(epilogue) else out
        if is_gated(epilogue):
            halves = [weight_of_codes(format, out, inputs, group, asymmetric) for _ in range(2)]
            weight = PanelWeight.gated(*halves)
        else:
            weight = weight_of_codes(format, out, inputs, group, asymmetric)
        # Gradients of small results can be compared by their absolute error.
        size_of_values = 1 / 64 if epilogue in ADDED else 1.0
        bias = values(width, dtype=dtype) * size_of_values if has_bias else None
        other = values(rows, out, dtype=dtype) * size_of_values if epilogue in ADDED else None
        name = f"{rows}x{inputs}x{out}-{epilogue}" + ("-int8" if activation_dtype == "int8" else "")
        x = values(rows, inputs, dtype=dtype) * size_of_values
        yield name, x, weight, out, (bias, other, epilogue, activation_dtype)


def weight_of_codes(
    format: str, out_features: int, in_features: int, group_size: int | None, asymmetric: bool
) -> PanelWeight:
    if not FORMATS[format].has_codes:
        return PanelWeight.from_dense(
            torch.randn(out_features, in_features, device="cpu") / in_features**0.5, format
        )
    groups = in_features // group_size if group_size else 1
    most = FORMATS[format].largest_code + 1
    # Results of about 1, as those of a trained layer.
    codes = torch.randint(most, (out_features, in_features), dtype=torch.uint8, device="cpu")
    has_floats = FORMATS[format].floats is not None
    if has_floats:
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    scales = (torch.rand(out_features, groups, device="cpu") + 0.1) / most / in_features**0.5
    zero_points = None
    if asymmetric and FORMATS[format].middle is not None:
        zero_points = torch.randint(most, (out_features, groups), dtype=torch.uint8, device="cpu")
    return PanelWeight.from_codes(format, codes, scales, zero_points, exact_scales=has_floats)
