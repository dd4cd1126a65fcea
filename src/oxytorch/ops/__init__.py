"""Ops: mathematical operations with a kernel, a reference and a name."""

from __future__ import annotations

from ._op import Cost, Op, Sample, registry
from .rms_norm import rms_norm

__all__ = ["Cost", "Op", "Sample", "registry", "rms_norm"]
