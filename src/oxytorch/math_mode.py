"""The precision of products of float32 matrices: `set_fp32_math_mode` and `fp32_math_mode`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from . import _library

MODES = ("fp32", "bf16")


def get_fp32_math_mode() -> str:
    """How products of float32 matrices are computed in this process: "fp32" or "bf16"."""
    return "fp32" if _before is None else "bf16"


def set_fp32_math_mode(mode: str) -> None:
    """Choose how products of float32 matrices are computed, in every thread of this process.

    mode: "fp32", or "bf16": the factors are rounded to bfloat16, and products are summed in
    float32. Tensors stay float32. docs/numerics.md lists the operators that follow it.

    It includes `torch.set_float32_matmul_precision("medium")`, but for CUDA; "fp32" gives back the
    settings of torch from before. Where it would cost time, as on processors without products of
    bfloat16, our operators multiply float32.

    Raises ValueError for another mode.
    """
    global _before
    if mode not in MODES:
        raise ValueError(f"set_fp32_math_mode: expected 'fp32' or 'bf16', got {mode!r}")
    if mode == get_fp32_math_mode():
        return
    if _before is None:
        _before = _TorchPrecision.now()
        _before.lower()
    else:
        _before.restore()
        _before = None
    if _library.loaded:
        _library.functions().oxytorch_round_products(int(mode == "bf16"))


@contextmanager
def fp32_math_mode(mode: str) -> Iterator[None]:
    """`set_fp32_math_mode` for a block, after which the mode from before holds again.

    The mode is the process's: other threads compute in it too as long as the block runs, and blocks
    of several threads must not overlap.
    """
    before = get_fp32_math_mode()
    set_fp32_math_mode(mode)
    try:
        yield
    finally:
        set_fp32_math_mode(before)


@dataclass(frozen=True)
class _TorchPrecision:
    """torch's settings. It has an old one for all devices and one for each backend, and refuses to
    tell the old one where they differ: then `whole` is None."""

    whole: str | None
    processor: str
    cuda: str

    @classmethod
    def now(cls) -> _TorchPrecision:
        try:
            whole = torch.get_float32_matmul_precision()
        except RuntimeError:
            whole = None
        return cls(whole, _onednn().fp32_precision, _cuda().fp32_precision)

    def lower(self) -> None:
        """Have oneDNN multiply bfloat16."""
        if self.whole is not None:
            torch.set_float32_matmul_precision("medium")
            _cuda().fp32_precision = self.cuda
        _onednn().fp32_precision = "bf16"

    def restore(self) -> None:
        if self.whole is not None:
            torch.set_float32_matmul_precision(self.whole)
        _onednn().fp32_precision = self.processor
        _cuda().fp32_precision = self.cuda


def _onednn() -> Any:
    return vars(torch.backends)["mkldnn"].matmul


def _cuda() -> Any:
    return vars(torch.backends)["cuda"].matmul


_before: _TorchPrecision | None = None
