"""The allocator over SYCL's memory, on whatever device dpctl finds (its CPU device does)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from oxytorch.memory import _core

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
    host = bytes(range(256)) * (3 * MiB // 256)
    there = memory.as_usm_memory(_Span(block, 3 * MiB, queue))
    there.copy_from_host(host)
    back = bytearray(3 * MiB)
    there.copy_to_host(back)
    assert bytes(back) == host
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
