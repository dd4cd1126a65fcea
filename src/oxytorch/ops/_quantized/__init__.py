"""Bytes with a scale and a zero point, and what products of them become, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .._samples import values
from ..panels import layout
from ..panels.epilogues import ACTIVATIONS, ADDED

NUMBERS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
"""The dtypes of results by name."""


def to_bytes(x: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """round(x / scale) + zero_point, ties to even, clamped to the dtype; NaN becomes the least."""
    limits = torch.iinfo(dtype)
    steps = (x * (1.0 / scale)).round() + zero_point
    return torch.where(steps.isnan(), limits.min, steps.clamp(limits.min, limits.max)).to(dtype)


def from_bytes(x: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """(x - zero_point) * scale, computed in `dtype`."""
    return (x.to(dtype) - zero_point) * scale


def steps_of_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of x in 255 steps: integers in x's dtype, and the size of a step [..., 1].

    A row of no number as large as 2^-100 is taken for zero.
    """
    largest = x.abs().amax(-1, keepdim=True)
    # No number / tensor, which torch computes as a product with the inverse, rounded twice.
    factor = torch.full_like(largest, 127) / torch.where(largest < 2.0**-100, 1.0, largest)
    return (x * factor).round(), largest / 127


def pack_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Panels and sums of an int8 weight [out_features, in_features], as the ops take them.

    Returns panels uint8 [panels, bytes of a panel] and channel_sums int32 [16 panels].
    """
    panels = layout.pack("int8", weight.contiguous().view(torch.uint8))
    return panels, padded(weight.sum(1, dtype=torch.int32))


def padded(channels: Tensor) -> Tensor:
    """Numbers of channels [out_features], with zeros up to whole panels."""
    return torch.nn.functional.pad(channels, (0, -channels.shape[0] % layout.OUTPUTS))


def result_of(
    sums: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    other_scale: float | None,
    other_zero_point: int,
    epilogue: str,
    out_dtype: str,
    out_scale: float | None,
    out_zero_point: int,
) -> Tensor:
    """What becomes of whole sums [..., out]: each operation is rounded to the dtype of `scales`.

    A floating result of float64 scales stays float64, for comparison.
    """
    wide = scales.dtype
    result = sums.to(wide) * scales
    if bias is not None:
        result = result + bias.to(wide)
    result = ACTIVATIONS[epilogue](result)
    if epilogue in ADDED:
        assert other is not None
        if other_scale is not None:
            other = from_bytes(other, other_scale, other_zero_point, wide)
        result = ADDED[epilogue](result + other.to(wide))
    dtype = NUMBERS[out_dtype]
    if out_scale is not None:
        return to_bytes(result, out_scale, out_zero_point, dtype)
    return result if wide == torch.float64 else result.to(dtype)


def random_bytes(*shape: int, dtype: torch.dtype) -> Tensor:
    """Bytes of any value."""
    return torch.randint(256, shape, dtype=torch.uint8, device="cpu").view(dtype)


def sample_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, float | None, int]:
    """Numbers of about 1, with scale and zero point if they are bytes."""
    if dtype.is_floating_point:
        return values(*shape, dtype=dtype), None, 0
    middle = 3 if dtype == torch.int8 else 131
    return random_bytes(*shape, dtype=dtype), 1 / 64, middle
