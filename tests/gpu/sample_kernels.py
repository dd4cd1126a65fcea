"""Kernels for the tests of building, loading and launching: small, and nothing of oxytorch."""

from __future__ import annotations

import importlib.util

import pytest

from oxytorch.gpu.kernel import Kernel, OpenClSource, Signature, TritonSource

SAMPLES = "sample_kernels:KERNELS"
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")

SCALE = """
__kernel void scale(ulong x, ulong y, long count, float factor) {
  __global const float *from = (__global const float *)x;
  __global float *to = (__global float *)y;
  long i = get_global_id(0);
  if (i < count) to[i] = fma(from[i], factor, SHIFT);
}
"""

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _shifted(x, factor, SHIFT: tl.constexpr):
        return tl.fma(x, factor, SHIFT)

    @triton.jit
    def scale(x, y, count, factor, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        valid = i < count
        loaded = tl.load(x.to(tl.pointer_type(tl.float32)) + i, valid)
        shifted = _shifted(loaded, factor, SHIFT)
        tl.store(y.to(tl.pointer_type(tl.float32)) + i, shifted, valid)


BLOCK = 256
ARGUMENTS = {"x": "i64", "y": "i64", "count": "i64", "factor": "fp32"}


def signatures() -> tuple[Signature, ...]:
    return Signature("plain", {"shift": 0}), Signature("shifted", {"shift": 1})


def _triton(signature: Signature) -> TritonSource:
    constants = {"SHIFT": float(signature.options["shift"]), "BLOCK": BLOCK}
    return TritonSource(scale, ARGUMENTS, constants, frozenset({"x", "y"}))


def _opencl(signature: Signature) -> OpenClSource:
    shift = f"{float(signature.options['shift'])}f"
    return OpenClSource(SCALE.replace("SHIFT", shift), "scale", ARGUMENTS, BLOCK)


KERNEL = Kernel("scale", signatures, _triton, _opencl)
KERNELS = (KERNEL,)
