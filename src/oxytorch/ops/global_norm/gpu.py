"""The GPU kernels of the norm of gradients: a sweep for each dtype, and one to end them."""

from __future__ import annotations

import functools

from ...gpu.kernel import Signature, TritonSource, kernel_of
from ..optimizer_step.gpu import arguments, float_signature, float_signatures

PROGRAMS = 2048
"""Programs of `squares`, and so partial sums: as many on every GPU, so that sums are the same."""

LANES = 1024

SQUARES_ARGUMENTS = arguments("tensors blocks block_count partials", block_count="i32")
NORM_ARGUMENTS = arguments(
    "partials count gradient_scale max_norm norm clip_factor", count="i32", max_norm="fp64"
)

squares_signature = functools.partial(float_signature, "squares")
NORM_SIGNATURE = Signature("norm", {})


def _squares(signature: Signature) -> TritonSource:
    from . import triton

    constants = {"FORMAT": signature.options["format"]}
    aligned = frozenset({"tensors", "blocks", "partials"})
    return TritonSource(triton.sum_squares, SQUARES_ARGUMENTS, constants, aligned)


def _norm(signature: Signature) -> TritonSource:
    from . import triton

    aligned = frozenset({"partials"})
    return TritonSource(triton.finish, NORM_ARGUMENTS, {"LANES": LANES}, aligned, num_warps=8)


SQUARES = kernel_of(
    __package__, "squares", functools.partial(float_signatures, "squares"), _squares
)
"""Sums of squares of the gradients in a table; PROGRAMS programs."""

NORM = kernel_of(__package__, "norm", lambda: (NORM_SIGNATURE,), _norm)
"""The norm and the factor that clips, from the partial sums of all sweeps; one program."""

KERNELS = (SQUARES, NORM)
