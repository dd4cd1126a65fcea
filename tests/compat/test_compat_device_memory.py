"""Statistics of `xpu`'s memory: torch's own, and those of our allocator where it is in use."""

from __future__ import annotations

import inspect

import pytest
import torch

import oxytorch.compat.ipex as ipex
from oxytorch.compat import device_memory
from oxytorch.memory import _core, torch_allocator
from oxytorch.memory.torch_allocator import Installed

MiB = 1 << 20


def test_torchs_statistics_are_read_without_use() -> None:
    assert ipex.xpu.memory_stats() == dict(torch.xpu.memory_stats())
    assert ipex.xpu.memory_allocated() == torch.xpu.memory_allocated()


def test_statistics_are_those_of_our_allocator_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _core.Fake(64 * MiB)
    allocator = _core.Allocator(fake.table, "native")
    made = Installed("xpu", "native", allocator, None, True)
    monkeypatch.setitem(torch_allocator._installed, "xpu", made)
    block = allocator.allocate(0, 3 * MiB)
    for device in (None, 0, "xpu:0", torch.device("xpu", 0)):
        assert ipex.xpu.memory_allocated(device) == 3 * MiB
        assert ipex.xpu.memory_reserved(device) >= 3 * MiB
    allocator.free(block)
    assert ipex.xpu.memory_allocated() == 0
    assert ipex.xpu.max_memory_allocated() == 3 * MiB
    ipex.xpu.reset_peak_memory_stats()
    ipex.xpu.reset_accumulated_memory_stats()
    assert ipex.xpu.max_memory_allocated() == 0
    assert ipex.xpu.memory_stats()["allocated_bytes.all.allocated"] == 0
    assert "xpu" in ipex.xpu.memory_summary()
    ipex.xpu.empty_cache()
    assert ipex.xpu.memory_reserved() == 0
    assert ipex.xpu.memory_snapshot() == []
    assert ipex.xpu.mem_get_info()[1] == 64 * MiB
    allocator.close()
    fake.end()


@pytest.mark.parametrize("name", ["memory_stats", "memory_allocated", "mem_get_info"])
def test_devices_are_taken_as_torch_takes_them(name: str) -> None:
    own, stock = (inspect.signature(getattr(m, name)) for m in (device_memory, torch.xpu))
    assert [*own.parameters] == [*stock.parameters]
