"""The GPU kernels of the norm of gradients: a sweep for each dtype, and one to end them."""

from __future__ import annotations

from collections.abc import Callable

from ...gpu.kernel import Kernel, OpenClSource, Signature, TritonSource
from ..optimizer_step.layout import Format

PROGRAMS = 2048
"""Programs of `squares`, and so partial sums: as many on every GPU, so that sums are the same."""

LANES = 1024

_FORMATS = (Format.FLOAT32, Format.BFLOAT16, Format.FLOAT16)


def squares_signature(format: Format) -> Signature:
    """The signature of `squares` for gradients in a format."""
    if format not in _FORMATS:
        raise ValueError(f"squares: expected float32, bfloat16 or float16, got {format.name}")
    return Signature(format.name.lower(), {"format": int(format)})


NORM_SIGNATURE = Signature("norm", {})


def _squares(signature: Signature) -> TritonSource:
    from . import triton

    arguments = {"tensors": "i64", "blocks": "i64", "block_count": "i32", "partials": "i64"}
    constants = {"FORMAT": signature.options["format"]}
    aligned = frozenset({"tensors", "blocks", "partials"})
    return TritonSource(triton.sum_squares, arguments, constants, aligned)


def _norm(signature: Signature) -> TritonSource:
    from . import triton

    arguments = {
        "partials": "i64",
        "count": "i32",
        "gradient_scale": "i64",
        "max_norm": "fp64",
        "norm": "i64",
        "clip_factor": "i64",
    }
    aligned = frozenset({"partials"})
    return TritonSource(triton.finish, arguments, {"LANES": LANES}, aligned, num_warps=8)


def _opencl(kernel: str) -> Callable[[Signature], OpenClSource]:
    def source(signature: Signature) -> OpenClSource:
        from . import opencl

        return opencl.source(kernel, signature)

    return source


SQUARES = Kernel(
    "squares",
    lambda: tuple(squares_signature(format) for format in _FORMATS),
    _squares,
    _opencl("squares"),
)
"""Sums of squares of the gradients in a table; PROGRAMS programs."""

NORM = Kernel("norm", lambda: (NORM_SIGNATURE,), _norm, _opencl("norm"))
"""The norm and the factor that clips, from the partial sums of all sweeps; one program."""

KERNELS = (SQUARES, NORM)
