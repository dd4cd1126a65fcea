"""Weights from rows of values into panels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._binding import with_kernel
from .._op import Cost, Sample, nbytes, register
from ..panels import layout
from ..panels.formats import CODES, FORMATS, PLAIN


@with_kernel
def pack_panels(values: Tensor, format: str, gated: bool = False) -> Tensor:
    """Returns values [out_features, in_features] in the order that `panels.layout` tells.

    values: float32 for format "fp32", bfloat16 for "bf16"; for "int8", "int4", "nf4" and "fp8"
    quantized values, uint8, one a byte.
    gated: panels alternate between the upper and the lower half of the outputs.
    Returns uint8 [panels, bytes of a panel]; padding is zero. There is no gradient. Other devices
    run plain PyTorch. Raises RuntimeError if a shape, dtype or format does not fit.
    """
    wanted, found = (
        str(dtype).removeprefix("torch.") for dtype in (FORMATS[format].dtype, values.dtype)
    )
    if wanted != found:
        raise RuntimeError(f"pack_panels: expected values of dtype {wanted}, got {found}")
    return layout.pack(format, values, gated)


def values_and_format(size: str) -> Iterator[tuple[str, Tensor, str, bool]]:
    """Name, values, format and whether they are gated, of sample calls; `unpack_panels` has them
    too."""
    shapes = {
        "cache": [(512, 512, False)],
        "memory": [(8192, 8192, False)],
        "test": [(16, 64, False), (2, 1, False), (33, 130, False), (66, 70, True), (32, 64, True)],
    }
    for format in (*CODES, *PLAIN):
        for out, inputs, gated in shapes[size]:
            if format in CODES:
                most = FORMATS[format].largest_code
                values = torch.randint(most + 1, (out, inputs), dtype=torch.uint8, device="cpu")
            else:
                values = torch.randn(out, inputs, device="cpu").to(PLAIN[format])
            yield f"{format}-{out}x{inputs}" + "-gated" * gated, values, format, gated


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory"); alike for every dtype."""
    for name, values, format, gated in values_and_format(size):
        yield Sample(name, (values, format, gated))


def cost(values: Tensor, format: str, gated: bool) -> Cost:
    """Reads the values, writes the panels."""
    out_features, in_features = values.shape
    panels = layout.panels_of(out_features, gated) * layout.panel_bytes(format, in_features)
    return Cost(nbytes(values) + panels, 0)


op = register(pack_panels, samples, cost, has_gradient=False)
