"""Memory for packed weights: where it begins."""

from __future__ import annotations

import torch

from oxytorch.ops.panels import PanelWeight


def test_large_panels_begin_at_a_huge_page() -> None:
    weight = PanelWeight.from_dense(torch.randn(1024, 1100))
    assert weight.packed.data_ptr() % (2 << 20) == 0
