"""Plain values to codes where the scales are given."""

from __future__ import annotations

import torch
from torch import Tensor

from . import layout

_MOST = {"int8": 255, "int4": 15, "nf4": 15}


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
