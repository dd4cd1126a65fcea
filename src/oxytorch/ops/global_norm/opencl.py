"""The GPU kernels of the norm of gradients as OpenCL C, for Intel GPUs."""

from __future__ import annotations

from pathlib import Path

from ...gpu.kernel import OpenClSource, Signature
from ..optimizer_step.opencl import OPTIONS, STEP_GROUP, assemble
from . import gpu


def source(kernel: str, signature: Signature) -> OpenClSource:
    """The source of a signature of `squares` or `norm`."""
    settings = {"GROUP": STEP_GROUP}
    pieces = ["tables.cl"]
    arguments = gpu.NORM_ARGUMENTS
    if kernel == "squares":
        settings["FORMAT"] = int(signature.options["format"])
        pieces = ["arithmetic.cl", "tables.cl", "formats.cl"]
        arguments = gpu.SQUARES_ARGUMENTS
    own = (Path(__file__).parent / f"{kernel}.cl").read_text(encoding="utf-8")
    text = assemble(settings, *pieces, own)
    return OpenClSource(text, kernel, arguments, STEP_GROUP, OPTIONS)
