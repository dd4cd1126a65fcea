"""Weights from rows of values into panels, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from .._binding import is_compiled
from ..panels import layout


def pack_panels(values: Tensor, format: str, gated: bool = False) -> Tensor:
    """Return values [out_features, in_features] in the order that `panels.layout` tells.

    values: bfloat16 for format "bf16"; for "int8", "int4" and "nf4" codes, uint8, one a byte.
    gated: panels alternate between the upper and the lower half of the outputs.
    Returns uint8 [panels, bytes of a panel]; padding is zero. Raises RuntimeError if a shape, dtype
    or format does not fit.
    """
    if values.device.type == "cpu" and is_compiled("pack_panels"):
        packed: Tensor = torch.ops.oxytorch.pack_panels(values, format, gated)
        return packed
    return layout.pack(format, values, gated)


def unpack_panels(
    panels: Tensor, format: str, out_features: int, in_features: int, gated: bool = False
) -> Tensor:
    """Return the values [out_features, in_features] of panels, as `pack_panels` takes them."""
    if panels.device.type == "cpu" and is_compiled("unpack_panels"):
        values: Tensor = torch.ops.oxytorch.unpack_panels(
            panels, format, out_features, in_features, gated
        )
        return values
    return layout.unpack(format, panels, out_features, in_features, gated)
