"""Weights from panels into rows of values; the kernel lies beside that of `pack_panels`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._binding import with_kernel
from .._op import Cost, Sample, register
from ..pack_panels import values_and_format
from ..panels import layout
from ..panels.formats import FORMATS


@with_kernel
def unpack_panels(
    panels: Tensor, format: str, out_features: int, in_features: int, gated: bool = False
) -> Tensor:
    """Returns the values [out_features, in_features] of panels, as `pack_panels` takes them.

    panels: uint8 [panels, bytes of a panel]. There is no gradient. Other devices run plain PyTorch.
    Raises RuntimeError if a shape, dtype or format does not fit.
    """
    return layout.unpack(format, panels, out_features, in_features, gated)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory"); alike for every dtype."""
    for name, values, format, gated in values_and_format(size):
        yield Sample(name, (layout.pack(format, values, gated), format, *values.shape, gated))


def cost(panels: Tensor, format: str, out_features: int, in_features: int, gated: bool) -> Cost:
    """Reads the panels, writes the values."""
    return Cost(panels.nbytes + out_features * in_features * FORMATS[format].dtype.itemsize, 0)


op = register(unpack_panels, samples, cost, has_gradient=False)
