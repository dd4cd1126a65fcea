"""All GPU kernels of all ops: what `oxytorch aot` builds."""

from __future__ import annotations

from ..gpu.kernel import Kernel
from .global_norm import gpu as global_norm
from .mean_squares import gpu as mean_squares
from .optimizer_step import gpu as optimizer_step

KERNELS: tuple[Kernel, ...] = (
    *optimizer_step.KERNELS,
    *global_norm.KERNELS,
    *mean_squares.KERNELS,
)
