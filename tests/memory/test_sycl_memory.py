"""The allocator over SYCL's memory, on whatever device dpctl finds (its CPU device does)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import oxytorch
from oxytorch.memory import _core, _sources, torch_allocator

dpctl = pytest.importorskip("dpctl", reason="dpctl is not installed")
memory = pytest.importorskip("dpctl.memory")
MiB = 1 << 20


def test_sycl_memory_is_cached_and_comes_back(sycl_driver: Any) -> None:
    queue = sycl_driver.own
    other = dpctl.SyclQueue(queue.sycl_context, queue.sycl_device)
    path = Path(dpctl.__file__).parent / "libDPCTLSyclInterface.so"
    queues = (ctypes.c_void_p * 1)(queue.addressof_ref())
    table = _core.Source()
    library = _core.library()
    _core.check(
        library.oxytorch_memory_sycl_source(str(path).encode(), queues, 1, ctypes.byref(table))
    )
    allocator = _core.Allocator(table, "native")
    stream, second = queue.addressof_ref(), other.addressof_ref()
    block = allocator.allocate(0, 3 * MiB, stream)
    _write_and_read(block, 3 * MiB, queue)
    allocator.record_stream(block, second)
    allocator.free(block)
    queue.wait()
    other.wait()
    assert allocator.allocate(0, 3 * MiB, stream) == block
    allocator.free(block)
    assert allocator.statistics(0)["reserved_bytes.all.current"] == 20 * MiB
    allocator.empty_cache(0)
    assert allocator.statistics(0)["reserved_bytes.all.current"] == 0
    with pytest.raises(_core.MemoryLibraryError, match="cannot map"):
        _core.Allocator(table, "mapped")
    allocator.close()


class _Torch:
    """What `use("xpu")` calls of a torch that has XPU, on SYCL's CPU device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, queue: Any) -> None:
        self.calls: list[str] = []
        self.queue = queue
        for name, value in {
            "_is_compiled": lambda: True,
            "is_initialized": lambda: "init" in self.calls,
            "init": lambda: self.calls.append("init"),
            "device_count": lambda: 1,
            "current_stream": lambda device: SimpleNamespace(sycl_queue=queue.addressof_ref()),
            "Stream": lambda **given: SimpleNamespace(sycl_queue=given["stream_id"]),
        }.items():
            monkeypatch.setattr(torch.xpu, name, value)
        monkeypatch.setattr(torch.xpu.memory, "XPUPluggableAllocator", self.pluggable)
        monkeypatch.setattr(torch.xpu.memory, "change_current_allocator", self.change)
        monkeypatch.setattr(torch_allocator, "_installed", {})
        monkeypatch.setattr(torch.library, "Library", lambda *names: self)
        _sources.xpu.cache_clear()

    def pluggable(self, path: str, allocate: str, free: str) -> Any:
        library = ctypes.CDLL(path)
        self.allocate, self.free = getattr(library, allocate), getattr(library, free)
        self.allocate.restype = ctypes.c_void_p
        return SimpleNamespace(allocator=lambda: SimpleNamespace())

    def change(self, allocator: Any) -> None:
        assert "init" not in self.calls
        self.calls.append("change")

    def impl(self, name: str, function: Any, key: str) -> None:
        assert (name, key) == ("record_stream", "XPU")
        self.record_stream = function

    def malloc(self, size: int) -> int:
        queue = ctypes.c_void_p(self.queue.addressof_ref())
        return int(self.allocate(ctypes.c_ssize_t(size), 0, queue))


def test_use_xpu_serves_torchs_calls_from_sycl_memory(
    sycl_driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = sycl_driver.own
    there = _Torch(monkeypatch, queue)
    oxytorch.memory.use("xpu")
    oxytorch.memory.use("xpu")
    assert there.calls == ["change", "init"]
    block = there.malloc(3 * MiB)
    _write_and_read(block, 3 * MiB, queue)
    assert oxytorch.memory.memory_allocated("xpu:0") == 3 * MiB
    assert oxytorch.memory.mem_get_info("xpu:0")[1] > 0
    assert "policy native" in oxytorch.memory.memory_summary("xpu:0")
    assert oxytorch.memory.memory_snapshot("xpu:0")[0]["total_size"] == 20 * MiB
    other = dpctl.SyclQueue(queue.sycl_context, queue.sycl_device)
    storage = SimpleNamespace(data_ptr=lambda: block)
    tensor = SimpleNamespace(untyped_storage=lambda: storage)
    stream = SimpleNamespace(stream_id=other.addressof_ref(), device_index=0, device_type=12)
    there.record_stream(tensor, stream)
    there.free(ctypes.c_void_p(block), ctypes.c_ssize_t(3 * MiB), 0, None)
    other.wait()
    assert there.malloc(3 * MiB) == block
    there.free(ctypes.c_void_p(block), ctypes.c_ssize_t(3 * MiB), 0, None)
    oxytorch.memory.set_per_process_memory_fraction(0.5, "xpu:0")
    oxytorch.memory.empty_cache("xpu:0")
    assert oxytorch.memory.memory_reserved("xpu:0") == 0
    assert oxytorch.memory.max_memory_reserved("xpu:0") == 20 * MiB
    oxytorch.memory.reset_peak_memory_stats("xpu:0")
    assert oxytorch.memory.max_memory_allocated("xpu:0") == 0
    with pytest.raises(RuntimeError, match="native=True"):
        oxytorch.memory.memory_stats("xpu:0", native=True)
    _core.library().oxytorch_memory_install(None, 0)
    _sources.xpu.cache_clear()


def test_use_xpu_names_a_policy_that_needs_mapping(
    sycl_driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Torch(monkeypatch, sycl_driver.own)
    with pytest.raises(oxytorch.memory.MemoryLibraryError, match="cannot map memory"):
        oxytorch.memory.use("xpu", policy="mapped")
    _sources.xpu.cache_clear()


def _write_and_read(address: int, size: int, queue: object) -> None:
    """Bytes that are copied there and back are the same."""
    given = bytes(i % 256 for i in range(size))
    span = memory.as_usm_memory(_Span(address, size, queue))
    span.copy_from_host(given)
    back = bytearray(size)
    span.copy_to_host(back)
    assert bytes(back) == given


class _Span:
    """Memory as SYCL's array interface describes it."""

    def __init__(self, address: int, size: int, queue: object) -> None:
        self.__sycl_usm_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 1,
            "syclobj": queue,
        }
