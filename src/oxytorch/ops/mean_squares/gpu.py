"""The GPU kernels that keep Adafactor's rows and columns; programs are the tiles of tiling.py."""

from __future__ import annotations

import functools

from ...gpu.kernel import Signature, TritonSource, kernel_of
from ..optimizer_step.gpu import arguments, float_signature, float_signatures
from ..optimizer_step.parsed_rules import families

ARGUMENTS = arguments("tensors tiles scalars found_inf")
FACTORS_ARGUMENTS = {**ARGUMENTS, "least": "fp64"}
_ALIGNED = frozenset({"tensors", "tiles", "scalars"})

sums_signature = functools.partial(float_signature, "factor_sums")
FACTORS_SIGNATURE = Signature("factors", {})


def weight_position() -> int:
    """Where the scalars of Adafactor have the weight of this step."""
    return families()["adafactor"].update.scalars.index("weight")


def _sums(signature: Signature) -> TritonSource:
    import triton.language as tl

    from . import triton

    types = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}
    constants = {"ELEMENT": types[signature.name], "WEIGHT": weight_position()}
    return TritonSource(triton.factor_sums, ARGUMENTS, constants, _ALIGNED)


def _factors(signature: Signature) -> TritonSource:
    from . import triton

    constants = {"WEIGHT": weight_position()}
    return TritonSource(triton.factors, FACTORS_ARGUMENTS, constants, _ALIGNED)


SUMS = kernel_of(
    __package__, "factor_sums", functools.partial(float_signatures, "factor_sums"), _sums
)
"""Means of squares of gradients; as many programs as `tiling.sum_tiles` has rows."""

FACTORS = kernel_of(__package__, "factors", lambda: (FACTORS_SIGNATURE,), _factors)
"""What the update of a factored state reads; as many programs as `tiling.factor_tiles` has rows."""

KERNELS = (SUMS, FACTORS)
