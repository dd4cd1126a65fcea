"""Plain values to codes: round to nearest, scales from the largest magnitude."""

from __future__ import annotations

import torch
from torch import Tensor

from . import layout

_LARGEST = {"int8": 127.0, "int4": 7.0, "nf4": 1.0}
_MOST = {"int8": 255, "int4": 15, "nf4": 15}


def nearest_codes(
    format: str, values: Tensor, group_size: int | None, *, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns codes uint8 [out, in], scales float32 [out, groups] and zero points or None.

    values: floating [out, in]. group_size: neighbouring k that share a scale; None: all of them.
    symmetric: codes around the middle, scale = largest magnitude / 127, 7 or 1; else the codes
    span the values' range with zero in it, with zero points uint8 [out, groups].
    """
    grouped = torch.unflatten(values.float(), 1, (-1, group_size or values.shape[1]))
    if symmetric or format == "nf4":
        scales = _stored(grouped.abs().amax(2) / _LARGEST[format])
        return codes_with(format, values, scales, None), scales, None
    low = grouped.amin(2).clamp(max=0)
    high = grouped.amax(2).clamp(min=0)
    scales = _stored((high - low) / _MOST[format])
    zero_points = (-low / scales).round().clamp(0, _MOST[format]).to(torch.uint8)
    return codes_with(format, values, scales, zero_points), scales, zero_points


def codes_with(format: str, values: Tensor, scales: Tensor, zero_points: Tensor | None) -> Tensor:
    """The nearest codes uint8 [out, in] for given scales and zero points [out, groups]."""
    units = torch.unflatten(values.float(), 1, (scales.shape[1], -1)) / scales[..., None]
    if format == "nf4":
        table = torch.tensor(layout.NF4, device=values.device)
        codes = torch.bucketize(units, (table[1:] + table[:-1]) / 2)
    else:
        middle = layout.MIDDLE[format] if zero_points is None else zero_points[..., None]
        codes = (units.round() + middle).clamp(0, _MOST[format])
    return codes.to(torch.uint8).flatten(1)


def _stored(scales: Tensor) -> Tensor:
    """Scales as they are stored, which codes are made for; one where all values are zero."""
    scales = torch.where(scales > 0, scales, scales.amax(1, keepdim=True))
    scales = torch.where(scales > 0, scales, 1.0)
    if scales.shape[1] == 1:
        return scales
    powers, halves = layout.split_scales(scales)
    return powers[:, None] * halves.clamp(min=2.0**-24).float()
