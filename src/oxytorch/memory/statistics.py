"""What memory is in use: torch's functions, for this allocator and for torch's own."""

from __future__ import annotations

import operator
import os
from typing import Any

import torch

from .torch_allocator import Device, Installed, device_of, installed

_MiB = 1 << 20


def _resolve(device: Device) -> tuple[str, int]:
    """The kind of device and its number."""
    found = device_of(device)
    if found.type == "cpu":
        if found.index:
            raise ValueError(f"device: expected 'cpu', of which there is one, got {str(device)!r}")
        return "cpu", 0
    if found.type not in ("cuda", "xpu"):
        raise ValueError(f"device: expected a cuda, xpu or cpu device, got {device!r}")
    if found.index is not None:
        return found.type, found.index
    module = getattr(torch, found.type)
    return found.type, int(module.current_device()) if module.is_initialized() else 0


def _ours(kind: str, native: bool) -> Installed | None:
    made = installed(kind)
    if kind == "cpu" and native:
        raise RuntimeError(
            "native=True: torch's allocator of CPU memory counts nothing; leave native out, after "
            "oxytorch.memory.use('cpu')"
        )
    if made is not None and made.whole_process and native:
        raise RuntimeError(
            f"native=True: torch's native allocator of {kind} is not in use; use() replaced it"
        )
    if kind == "cpu" and made is None:
        raise RuntimeError(
            "device: CPU memory has statistics and limits after oxytorch.memory.use('cpu') alone, "
            "for what was taken since"
        )
    return None if native or made is None or not made.whole_process else made


def _torchs(kind: str, name: str, *arguments: Any) -> Any:
    """The result of torch's function, which may raise whatever comes first without a device."""
    module = getattr(torch, kind)
    try:
        return getattr(module, name)(*arguments)
    except (AssertionError, AttributeError, RuntimeError) as error:
        if module.is_available():
            raise
        raise RuntimeError(
            f"{name}: torch {torch.__version__} finds no {kind} device here; name another, such as "
            "'cpu' after oxytorch.memory.use('cpu')"
        ) from error


def _bytes(call: str, size: int) -> int:
    """A number of bytes that C can take."""
    try:
        if isinstance(size, bool):
            raise TypeError("a truth is no size")
        found = operator.index(size)
    except TypeError as error:
        raise TypeError(f"{call}: expected size in bytes, an integer, got {size!r}") from error
    if not 0 <= found < 1 << 63:
        raise ValueError(f"{call}: size: expected bytes from 0 to 2 ** 63 - 1, got {size}")
    return found


def _ask(device: Device, native: bool, torchs: str, own: str) -> Any:
    """The result of torch's function of that name, or of this allocator's own."""
    kind, index = _resolve(device)
    made = _ours(kind, native)
    if made is None:
        return _torchs(kind, torchs, index)
    return getattr(made.allocator, own)(index)


def memory_stats(device: Device = None, *, native: bool = False) -> dict[str, Any]:
    """Counts under torch's keys (see `torch.cuda.memory_stats`).

    Args:
        device: a torch device or the number of a CUDA device; None: the current CUDA device.
        native: of torch's native allocator; without `use()` that is what is read anyway.
    """
    return dict(_ask(device, native, "memory_stats", "statistics"))


def memory_allocated(device: Device = None, *, native: bool = False) -> int:
    """Bytes of live tensors, each rounded up to 512."""
    return int(memory_stats(device, native=native).get("allocated_bytes.all.current", 0))


def max_memory_allocated(device: Device = None, *, native: bool = False) -> int:
    """The most that `memory_allocated` was since the start or `reset_peak_memory_stats`."""
    return int(memory_stats(device, native=native).get("allocated_bytes.all.peak", 0))


def memory_reserved(device: Device = None, *, native: bool = False) -> int:
    """Bytes that the allocator holds of the device, in use or cached."""
    return int(memory_stats(device, native=native).get("reserved_bytes.all.current", 0))


def max_memory_reserved(device: Device = None, *, native: bool = False) -> int:
    """The most that `memory_reserved` was since the start or `reset_peak_memory_stats`."""
    return int(memory_stats(device, native=native).get("reserved_bytes.all.peak", 0))


def reset_peak_memory_stats(device: Device = None, *, native: bool = False) -> None:
    """Peaks become what is in use now."""
    _ask(device, native, "reset_peak_memory_stats", "reset_peaks")


def reset_accumulated_memory_stats(device: Device = None, *, native: bool = False) -> None:
    """Sums over time ("allocated" and "freed") become 0."""
    _ask(device, native, "reset_accumulated_memory_stats", "reset_accumulated")


def empty_cache(device: Device = None, *, native: bool = False) -> None:
    """Gives the device what no tensor needs, and waits for its work to that end."""
    kind, index = _resolve(device)
    made = _ours(kind, native)
    if made is None:
        _torchs(kind, "empty_cache")
    else:
        made.allocator.empty_cache(index if device is not None else -1)


def set_per_process_memory_fraction(
    fraction: float, device: Device = None, *, native: bool = False
) -> None:
    """At most this part of the device's memory is held; more raises as if it were all there is."""
    if not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise ValueError(f"fraction: expected a number above 0 and up to 1, got {fraction!r}")
    kind, index = _resolve(device)
    made = _ours(kind, native)
    if made is None:
        _torchs(kind, "set_per_process_memory_fraction", fraction, index)
    else:
        total = made.allocator.memory_info(index)[1]
        # Not 0, which would be no limit.
        made.allocator.set_limit(index, max(1, int(fraction * total)))


def set_memory_limit(size: int, device: Device = None) -> None:
    """At most so many bytes are held; 0: no limit. For this allocator alone.

    Beyond the limit "cuda" is out of memory; on the CPU tensors come from the C library then, which
    has no limit.
    """
    size = _bytes("set_memory_limit", size)
    kind, index = _resolve(device)
    made = _ours(kind, False)
    if made is None:
        raise RuntimeError(f"set_memory_limit: call oxytorch.memory.use({kind!r}) first")
    made.allocator.set_limit(index, size)


def mem_get_info(device: Device = None, *, native: bool = False) -> tuple[int, int]:
    """Free and total bytes of the device, or of the machine, whoever holds the rest."""
    if _resolve(device)[0] == "cpu":
        page = os.sysconf("SC_PAGESIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    free, total = _ask(device, native, "mem_get_info", "memory_info")
    return int(free), int(total)


def memory_snapshot(device: Device = None, *, native: bool = False) -> list[dict[str, Any]]:
    """Segments and their blocks, in the schema of `torch.cuda.memory_snapshot`."""
    kind, index = _resolve(device)
    made = _ours(kind, native)
    if made is not None:
        return made.allocator.snapshot(index)
    segments: list[dict[str, Any]] = _torchs(kind, "memory_snapshot")
    return [segment for segment in segments if segment["device"] == index]


def memory_report(size: int = 0, device: Device = None) -> str:
    """What is held, cached and split; for a `size` above 0 as an error for want of it says it."""
    if isinstance(size, str | torch.device):
        raise TypeError(
            f"memory_report: expected size in bytes before the device, got {size!r}; "
            f"memory_report(device={size!r})"
        )
    size = _bytes("memory_report", size)
    kind, index = _resolve(device)
    made = _ours(kind, False)
    if made is None:
        raise RuntimeError(f"memory_report: call oxytorch.memory.use({kind!r}) first")
    return made.allocator.report(index, size)


def memory_summary(device: Device = None, *, native: bool = False) -> str:
    """A table of what is in use now, at the peak, and in sum."""
    kind, index = _resolve(device)
    stats = memory_stats(device, native=native)
    made = _ours(kind, native)
    name = f"oxytorch, policy {made.policy}" if made else "torch's native allocator"
    lines = [
        f"{kind}:{index} by {name}; out of memory {stats.get('num_ooms', 0)} times, "
        f"{stats.get('num_alloc_retries', 0)} retries",
        f"{'MiB':22}{'now':>12}{'peak':>12}{'allocated':>14}{'freed':>14}",
    ]
    for key in ("allocated", "requested", "active", "reserved", "inactive_split"):
        values = [
            stats.get(f"{key}_bytes.all.{count}", 0) / _MiB
            for count in ("current", "peak", "allocated", "freed")
        ]
        lines.append(
            f"{key:22}{values[0]:12.1f}{values[1]:12.1f}{values[2]:14.1f}{values[3]:14.1f}"
        )
    return "\n".join(lines)
