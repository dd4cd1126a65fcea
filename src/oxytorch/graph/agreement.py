"""How far the outputs of two runs lie apart, and how far they may."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference allowed, as a fraction of the largest value of the original's output, by the
narrowest dtype that is computed in."""


def floating_tensors(value: Any) -> Iterator[torch.Tensor]:
    """All floating tensors in an output, in order; containers and mappings are looked into."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            yield from floating_tensors([*value.unbind()])
        elif value.is_floating_point():
            yield value if value.layout == torch.strided else value.to_dense()
    elif isinstance(value, dict) or hasattr(value, "keys"):
        for key in value.keys():  # noqa: SIM118 (transformers' outputs are no plain dicts)
            yield from floating_tensors(value[key])
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from floating_tensors(item)


def difference(expected: Any, found: Any) -> float:
    """Largest difference of any output as a fraction of that output's largest value."""
    ours, theirs = [*floating_tensors(found)], [*floating_tensors(expected)]
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return float("inf")
    worst = 0.0
    for mine, original in zip(ours, theirs, strict=True):
        if original.numel() == 0:
            continue
        wanted, got = original.double(), mine.double()
        finite = wanted.isfinite()
        if not torch.equal(finite, got.isfinite()):
            return float("inf")
        gap = torch.where(finite, (wanted - got).abs(), 0.0).max()
        size = torch.where(finite, wanted.abs(), 0.0).max()
        worst = max(worst, float(gap / size.clamp_min(1e-12)))
    return worst
