"""The four ways in which the demo runs the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Variant:
    """One row of the demo's table: the model in `dtype`, through `oxytorch.optimize` or not.

    Stock bf16 is the model cast by `.to(torch.bfloat16)`: on this model it is faster than
    `torch.autocast`, and so the harder one to beat.
    """

    name: str
    optimized: bool
    dtype: torch.dtype | None = None

    def build(self, model: torch.nn.Module, sample: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        """The model to run; `model` itself stays as it is. sample: arguments of a typical call."""
        if self.optimized:
            import oxytorch

            return oxytorch.optimize(model, dtype=self.dtype, sample_input=dict(sample))
        return model if self.dtype is None else copy.deepcopy(model).to(self.dtype)


STOCK = Variant("stock fp32", optimized=False)
OPTIMIZED = Variant("optimized fp32", optimized=True)
OPTIMIZED_BF16 = Variant("optimized bf16", optimized=True, dtype=torch.bfloat16)
VARIANTS = (
    STOCK,
    OPTIMIZED,
    Variant("stock bf16", optimized=False, dtype=torch.bfloat16),
    OPTIMIZED_BF16,
)
