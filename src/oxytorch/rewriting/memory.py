"""How much memory a model takes, and how much there is, asked before work starts."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
from torch import nn

from ..core.packed import PackedTensor

_RETURNED_AT_ONCE = 32 << 20

_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def nbytes(model: nn.Module) -> int:
    """Bytes of a model's parameters as they are stored; shared ones count once."""
    return sum(_stored(p) for p in model.parameters() if p.device.type != "meta")


def _stored(parameter: torch.Tensor) -> int:
    if isinstance(parameter, PackedTensor):
        return parameter.nbytes_packed()
    if parameter.layout == torch.sparse_coo:
        return parameter._indices().nbytes + parameter._values().nbytes
    if parameter.layout == torch.sparse_csr:
        parts = (parameter.crow_indices(), parameter.col_indices(), parameter.values())
        return sum(part.nbytes for part in parts)
    return parameter.nbytes


def available_bytes() -> int | None:
    """Bytes that this process can still take, or None where the system does not say.

    The least of what the machine has (caches of files count as free) and what a container's limit
    leaves.
    """
    found = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) << 10)
    for limit, usage in _CGROUPS:
        if limit.exists() and usage.exists() and limit.read_text().strip().isdigit():
            found.append(int(limit.read_text()) - int(usage.read_text()) + _file_cache())
    return max(0, min(found)) if found else None


def _file_cache() -> int:
    """Bytes of a container's usage that are caches of files, which the kernel gives back."""
    for path in (Path("/sys/fs/cgroup/memory.stat"), Path("/sys/fs/cgroup/memory/memory.stat")):
        if path.exists():
            fields = dict(line.split() for line in path.read_text().splitlines())
            return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
    return 0


def check_available(caller: str, needed: int, what: str) -> None:
    """Raise MemoryError where `needed` bytes are more than there are. what: they are needed for."""
    free = available_bytes()
    if free is not None and needed > free:
        raise MemoryError(
            f"{caller}: expected {size_text(needed)} of free memory for {what}, got "
            f"{size_text(free)}"
        )


class Returned:
    """Gives memory that was freed back to the system, whenever enough has come together.

    glibc keeps freed blocks of up to 32 MiB: without this, plain weights would stay resident.
    """

    def __init__(self) -> None:
        self._freed = 0
        # Only glibc has it.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None

    def add(self, freed: int) -> None:
        """Note that so many bytes were freed."""
        self._freed += freed
        if self._freed >= _RETURNED_AT_ONCE and self._trim is not None:
            self._freed = 0
            self._trim(0)


def size_text(count: int) -> str:
    """Bytes for people, in powers of 1024."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
