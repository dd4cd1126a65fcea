"""The sources of devices' memory, one of each kind in a process."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

import torch

from . import _core
from .errors import MemoryLibraryError

INSTALL = "pip install 'oxytorch[intel]'"


@functools.cache
def cuda() -> _core.Source:
    """Memory of all CUDA devices."""
    table = _core.Source()
    _core.check(_core.library().oxytorch_memory_cuda_source(ctypes.byref(table)))
    return table


@functools.cache
def xpu() -> _core.Source:
    """Memory of torch's XPU devices; `give_queues` comes before its first use."""
    found = importlib.util.find_spec("dpctl")
    if found is None or found.origin is None:
        raise MemoryLibraryError(f"xpu: SYCL is reached through dpctl, which is missing: {INSTALL}")
    path = Path(found.origin).parent / "libDPCTLSyclInterface.so"
    table = _core.Source()
    _core.check(
        _core.library().oxytorch_memory_sycl_source(
            str(path).encode(), None, torch.xpu.device_count(), ctypes.byref(table)
        )
    )
    return table


def give_queues(table: _core.Source) -> None:
    """Gives the source a queue of torch's of each device: memory is made in its context."""
    for device in range(table.devices):
        queue = ctypes.c_void_p(int(torch.xpu.current_stream(device).sycl_queue))
        _core.check(_core.library().oxytorch_memory_sycl_give(ctypes.byref(table), device, queue))
