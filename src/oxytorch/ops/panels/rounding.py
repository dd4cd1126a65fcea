"""Plain values to codes where the scales are given."""

from __future__ import annotations

import torch
from torch import Tensor

from .formats import FORMATS


def codes_with(format: str, values: Tensor, scales: Tensor, zero_points: Tensor | None) -> Tensor:
    """The nearest codes uint8 [out, in] for given scales and zero points [out, groups]."""
    units = torch.unflatten(values.float(), 1, (scales.shape[1], -1)) / scales[..., None]
    kind = FORMATS[format]
    if kind.middle is None:
        codes = kind.nearest(units)
    else:
        middle = kind.middle if zero_points is None else zero_points[..., None]
        codes = (units.round() + middle).clamp(0, kind.largest_code)
    return codes.to(torch.uint8).flatten(1)
