"""The GPU kernels of the norm of gradients as OpenCL C, for Intel GPUs."""

from __future__ import annotations

from pathlib import Path

from ...gpu.kernel import OpenClSource, Signature
from ..optimizer_step.opencl import OPTIONS, STEP_GROUP, assemble

_ARGUMENTS = {
    "squares": {"tensors": "i64", "blocks": "i64", "block_count": "i32", "partials": "i64"},
    "norm": {
        "partials": "i64",
        "count": "i32",
        "gradient_scale": "i64",
        "max_norm": "fp64",
        "norm": "i64",
        "clip_factor": "i64",
    },
}


def source(kernel: str, signature: Signature) -> OpenClSource:
    """The source of a signature of `squares` or `norm`."""
    settings = {"GROUP": STEP_GROUP, "GRADIENT": 2}
    pieces = ["tables.cl"]
    if kernel == "squares":
        settings["FORMAT"] = int(signature.options["format"])
        pieces = ["arithmetic.cl", "tables.cl", "formats.cl"]
    own = (Path(__file__).parent / f"{kernel}.cl").read_text(encoding="utf-8")
    text = assemble(settings, *pieces, own)
    return OpenClSource(text, kernel, _ARGUMENTS[kernel], STEP_GROUP, OPTIONS)
