"""The GPU kernels of Adafactor's rows and columns as OpenCL C, for Intel GPUs."""

from __future__ import annotations

from pathlib import Path

from ...gpu.kernel import OpenClSource, Signature
from ..optimizer_step.opencl import OPTIONS, assemble, helpers
from . import gpu, tiling


def source(kernel: str, signature: Signature) -> OpenClSource:
    """The source of a signature of `factor_sums` or `factors`."""
    is_sums = kernel == "factor_sums"
    settings = {
        "GROUP": tiling.LANES,
        "SMALL": tiling.SMALL,
        "LANES": tiling.LANES,
        "STRIP": tiling.STRIP,
        "STRIPE": tiling.STRIPE,
        "WEIGHT": gpu.weight_position(),
        "FORMAT": int(signature.options.get("format", 0)),
        "IS_SUMS": int(is_sums),
    }
    own = (Path(__file__).parent / "factors.cl").read_text(encoding="utf-8")
    text = assemble(settings, "tables.cl", "typedef float value;\n", helpers()[1], own)
    arguments = gpu.ARGUMENTS if is_sums else gpu.FACTORS_ARGUMENTS
    return OpenClSource(text, kernel, arguments, tiling.LANES, OPTIONS)
