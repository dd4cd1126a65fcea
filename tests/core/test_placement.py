"""Memory for packed weights: where it begins, and when the heap gives back what they replaced."""

from __future__ import annotations

import pytest
import torch

from oxytorch.core import placement
from oxytorch.ops.panels import PanelWeight


def test_large_panels_begin_at_a_huge_page() -> None:
    weight = PanelWeight.from_dense(torch.randn(1024, 1100))
    assert weight.packed.data_ptr() % (2 << 20) == 0


@pytest.mark.parametrize("count", [0, 1, (2 << 20) - 1, 2 << 20, (4 << 20) + 3])
def test_memory_has_the_size_asked_for(count: int) -> None:
    found = placement.empty_bytes(count)
    assert (found.dtype, found.shape) == (torch.uint8, (count,))
    found.fill_(7)
    assert int(found.sum(dtype=torch.int64)) == 7 * count


def test_the_heap_is_trimmed_after_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    placement.trim_heap()  # what was noted before counts no more
    trims = []
    own = placement.trim_heap
    monkeypatch.setattr(placement, "trim_heap", lambda: (trims.append(1), own()))
    half = placement.MOST_FREED // 2
    for wanted in (0, 1, 1, 2):
        placement.note_freed(half)
        assert len(trims) == wanted
