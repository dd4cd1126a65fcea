"""`interpolate` in programs: by factors it stays one operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oxytorch


class Resized(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.options = nn.Conv2d(3, 16, 3, padding=1), options
        self.last = nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        resized = F.interpolate(self.first(x), **self.options)
        return self.last(resized)  # type: ignore[no-any-return]


OPTIONS = [
    {"scale_factor": 2},
    {"scale_factor": (2, 1.5)},
    {"scale_factor": 1.3, "mode": "nearest-exact"},
    {"scale_factor": 2, "mode": "bilinear", "align_corners": True},
    {"scale_factor": 0.7, "mode": "bilinear", "align_corners": False},
    {"scale_factor": 0.5, "mode": "bilinear", "antialias": True},
    {"scale_factor": 2, "mode": "bicubic"},
]
SIZED: list[dict[str, Any]] = [
    {"size": (9, 11), "mode": "bilinear"},
    {"size": 13},
    {"scale_factor": 0.5, "mode": "bilinear", "recompute_scale_factor": True},
]


@pytest.mark.parametrize("options", [*OPTIONS, *SIZED], ids=str)
def test_answers_are_torchs_for_other_sizes_and_from_a_file(
    options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Resized(**options).eval(), torch.randn(2, 3, 10, 14)
    optimized = oxytorch.optimize(model, sample_input=x, graph=True, tune=False)
    oxytorch.save(model, tmp_path / "m.oxy", sample_input=x)
    loaded = oxytorch.load(tmp_path / "m.oxy")
    with torch.inference_mode():
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-5)
        for shape in ((2, 3, 10, 14), (1, 3, 10, 14), (3, 3, 12, 17), (2, 3, 10, 14)):
            other = torch.randn(shape)
            torch.testing.assert_close(optimized(other), model(other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_by_factors_it_stays_one_operator(options: dict[str, Any]) -> None:
    model = Resized(**options).eval()
    text = str(oxytorch.graph.explain(model, torch.randn(2, 3, 10, 14)))
    steps = [line for line in text.splitlines() if "upsample_" in line and ".vec" in line]
    assert steps and "_unsafe_index" not in text and "gather" not in text


def test_by_factors_it_stays_one_beside_what_is_taken_apart() -> None:
    class Both(Resized):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.vector_norm(super().forward(x), dim=1)

    model = Both(scale_factor=2, mode="bilinear").eval()
    text = str(oxytorch.graph.explain(model, torch.randn(2, 3, 10, 14)))
    assert "upsample_bilinear2d.vec" in text and "_unsafe_index" not in text
