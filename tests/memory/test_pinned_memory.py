"""Pinned memory of the host: when it is used again, and tensors of it on SYCL's CPU device."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oxytorch import memory
from oxytorch.memory import _core
from oxytorch.memory.pinned import HOST_STREAM, PinnedMemory, over

MiB = 1 << 20


def test_pinned_block_waits_for_the_streams_that_use_it() -> None:
    fake = _core.Fake(256 * MiB, event_delay=-1)
    allocator = over(fake.table)
    block = allocator.allocate(0, 3 * MiB, HOST_STREAM)
    allocator.free(block)
    assert allocator.allocate(0, 3 * MiB, HOST_STREAM) == block, "no stream used it"
    allocator.record_stream(block, 8)
    allocator.free(block)
    assert allocator.statistics(0)["active_bytes.all.current"] == 3 * MiB
    other = allocator.allocate(0, 3 * MiB, HOST_STREAM)
    assert other != block, "the stream may still read it"
    allocator.free(other)
    allocator.empty_cache(0)
    assert allocator.statistics(0)["reserved_bytes.all.current"] == 0
    assert fake.counts()["held_bytes"] == 0
    allocator.close()
    assert fake.mistake() == ""
    fake.end()


def test_pinned_memory_comes_free_when_its_stream_has_passed() -> None:
    fake = _core.Fake(256 * MiB, event_delay=2)
    allocator = over(fake.table)
    block = allocator.allocate(0, 3 * MiB, HOST_STREAM)
    allocator.record_stream(block, 8)
    allocator.free(block)
    seen = {allocator.allocate(0, 3 * MiB, HOST_STREAM) for _ in range(6)}
    assert block in seen
    allocator.close()
    fake.end()


def test_source_without_pinned_memory_is_named() -> None:
    table = _core.Source()
    _core.check(_core.library().oxytorch_memory_host_source(ctypes.byref(table)))
    with pytest.raises(memory.MemoryLibraryError, match="host has no pinned memory"):
        over(table)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_pinned_needs_a_device() -> None:
    with pytest.raises(RuntimeError, match="built without CUDA"):
        memory.pinned("cuda")
    with pytest.raises(RuntimeError, match="built without XPU"):
        memory.pinned("xpu")
    with pytest.raises(ValueError, match="expected a cuda or xpu device, got cpu"):
        memory.pinned("cpu")


def test_pinned_tensors_on_sycls_cpu_device(sycl_driver: Any) -> None:
    dpctl = pytest.importorskip("dpctl", reason="dpctl is not installed")
    queue = sycl_driver.own
    path = Path(dpctl.__file__).parent / "libDPCTLSyclInterface.so"
    queues = (ctypes.c_void_p * 1)(queue.addressof_ref())
    table = _core.Source()
    _core.check(
        _core.library().oxytorch_memory_sycl_source(
            str(path).encode(), queues, 1, ctypes.byref(table)
        )
    )
    pinned = PinnedMemory(over(table), "xpu", 0)
    x = pinned.copy(torch.arange(1 << 20).view(4, -1))
    assert torch.equal(x, torch.arange(1 << 20).view(4, -1))
    begin = x.data_ptr()
    pinned.record_stream(x[2:], SimpleNamespace(sycl_queue=queue.addressof_ref()))
    assert pinned.memory_stats()["allocated_bytes.all.current"] == 8 * MiB
    view = x[1]
    del x
    gc.collect()
    assert pinned.memory_stats()["allocated_bytes.all.current"] == 8 * MiB
    del view
    assert pinned.memory_stats()["allocated_bytes.all.current"] == 0
    queue.wait()
    assert pinned.empty(4, 1 << 18, dtype=torch.int64).data_ptr() == begin
    assert pinned.empty(0, 3).shape == (0, 3)
    with pytest.raises(ValueError, match="sizes of at least 0"):
        pinned.empty(-1)
    with pytest.raises(ValueError, match="this memory is of xpu:0"):
        pinned.record_stream(view_of(pinned), SimpleNamespace(device=torch.device("xpu", 1)))
    gc.collect()
    pinned.empty_cache()
    assert pinned.memory_stats()["reserved_bytes.all.current"] == 0


def view_of(pinned: PinnedMemory) -> torch.Tensor:
    return pinned.empty(3)
