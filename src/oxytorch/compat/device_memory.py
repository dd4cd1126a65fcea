"""`xpu`'s statistics of memory: of oxytorch's allocator after `oxytorch.memory.use("xpu")`, else of
torch's."""

from __future__ import annotations

from typing import Any

import torch

from .. import memory

Device = torch.device | int | str | None


def _device(device: Device) -> str:
    if device is None:
        return "xpu"
    return f"xpu:{device}" if isinstance(device, int) else str(device)


def memory_stats(device: Device = None) -> dict[str, Any]:
    return memory.memory_stats(_device(device))


def memory_snapshot(device: Device = None) -> Any:
    return memory.memory_snapshot(_device(device))


def memory_allocated(device: Device = None) -> int:
    return memory.memory_allocated(_device(device))


def max_memory_allocated(device: Device = None) -> int:
    return memory.max_memory_allocated(_device(device))


def memory_reserved(device: Device = None) -> int:
    return memory.memory_reserved(_device(device))


def max_memory_reserved(device: Device = None) -> int:
    return memory.max_memory_reserved(_device(device))


def reset_peak_memory_stats(device: Device = None) -> None:
    memory.reset_peak_memory_stats(_device(device))


def reset_accumulated_memory_stats(device: Device = None) -> None:
    memory.reset_accumulated_memory_stats(_device(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    return memory.mem_get_info(_device(device))


def empty_cache() -> None:
    memory.empty_cache("xpu")


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """abbreviated: taken, and without effect."""
    return memory.memory_summary(_device(device))
