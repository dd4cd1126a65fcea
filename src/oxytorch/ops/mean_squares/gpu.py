"""The GPU kernels that keep Adafactor's rows and columns; programs are the tiles of tiling.py."""

from __future__ import annotations

from collections.abc import Callable

from ...gpu.kernel import Kernel, OpenClSource, Signature, TritonSource
from ..optimizer_step import rule_text
from ..optimizer_step.layout import Format

_FORMATS = (Format.FLOAT32, Format.BFLOAT16, Format.FLOAT16)


def sums_signature(format: Format) -> Signature:
    """The signature of `factor_sums` for gradients in a format."""
    if format not in _FORMATS:
        raise ValueError(f"factor_sums: expected float32, bfloat16 or float16, got {format.name}")
    return Signature(format.name.lower(), {"format": int(format)})


FACTORS_SIGNATURE = Signature("factors", {})


def _weight() -> int:
    """Where the scalars of Adafactor have the weight of this step."""
    return rule_text.families()["adafactor"].update.scalars.index("weight")


def _sums(signature: Signature) -> TritonSource:
    import triton.language as tl

    from . import triton

    arguments = {"tensors": "i64", "tiles": "i64", "scalars": "i64", "found_inf": "i64"}
    types = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}
    constants = {"ELEMENT": types[signature.name], "WEIGHT": _weight()}
    aligned = frozenset({"tensors", "tiles", "scalars"})
    return TritonSource(triton.factor_sums, arguments, constants, aligned)


def _factors(signature: Signature) -> TritonSource:
    from . import triton

    arguments = {
        "tensors": "i64",
        "tiles": "i64",
        "scalars": "i64",
        "found_inf": "i64",
        "least": "fp64",
    }
    aligned = frozenset({"tensors", "tiles", "scalars"})
    return TritonSource(triton.factors, arguments, {"WEIGHT": _weight()}, aligned)


def _opencl(kernel: str) -> Callable[[Signature], OpenClSource]:
    def source(signature: Signature) -> OpenClSource:
        from . import opencl

        return opencl.source(kernel, signature)

    return source


SUMS = Kernel(
    "factor_sums",
    lambda: tuple(sums_signature(format) for format in _FORMATS),
    _sums,
    _opencl("factor_sums"),
)
"""Means of squares of gradients; as many programs as `tiling.sum_tiles` has rows."""

FACTORS = Kernel("factors", lambda: (FACTORS_SIGNATURE,), _factors, _opencl("factors"))
"""What the update of a factored state reads; as many programs as `tiling.factor_tiles` has rows."""

KERNELS = (SUMS, FACTORS)
