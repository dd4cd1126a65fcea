"""`xpu`'s statistics of memory: of oxytorch's allocator after `oxytorch.memory.use("xpu")`, else of
torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from .. import memory

Device = torch.device | int | str | None
_T = TypeVar("_T")


def _device(device: Device) -> str:
    if device is None:
        return "xpu"
    return f"xpu:{device}" if isinstance(device, int) else str(device)


def _of_xpu(function: Callable[[str], _T]) -> Callable[[Device], _T]:
    """A function of `oxytorch.memory`, for devices as `torch.xpu` takes them."""

    def of_xpu(device: Device = None) -> _T:
        return function(_device(device))

    of_xpu.__name__ = of_xpu.__qualname__ = function.__name__
    of_xpu.__doc__ = function.__doc__
    return of_xpu


memory_stats = _of_xpu(memory.memory_stats)
memory_snapshot = _of_xpu(memory.memory_snapshot)
memory_allocated = _of_xpu(memory.memory_allocated)
max_memory_allocated = _of_xpu(memory.max_memory_allocated)
memory_reserved = _of_xpu(memory.memory_reserved)
max_memory_reserved = _of_xpu(memory.max_memory_reserved)
reset_peak_memory_stats = _of_xpu(memory.reset_peak_memory_stats)
reset_accumulated_memory_stats = _of_xpu(memory.reset_accumulated_memory_stats)
mem_get_info = _of_xpu(memory.mem_get_info)


def empty_cache() -> None:
    memory.empty_cache("xpu")


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """abbreviated: taken, and without effect."""
    return memory.memory_summary(_device(device))
