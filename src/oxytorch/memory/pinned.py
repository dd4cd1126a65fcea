"""A cache of page-locked memory of the host, which devices read and write themselves."""

from __future__ import annotations

import ctypes
import math
import threading
from typing import Any

import torch

from ..core.own_storage import bytes_over
from . import _core, _sources
from .torch_allocator import check_device, device_of

HOST_STREAM = (1 << 64) - 1
"""The processor, in the place of a stream."""


class PinnedMemory:
    """Pinned CPU tensors of one device, whose memory is used again.

    Page-locking costs more than most copies: what a freed tensor had serves the next one, once the
    streams that were named for it have passed what they had been given when it was freed.
    `pinned` makes it.
    """

    def __init__(self, allocator: _core.Allocator, kind: str, index: int) -> None:
        self.allocator, self.kind, self.index = allocator, kind, index

    def empty(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns a new pinned CPU tensor, whose values are whatever was there.

        Args:
            size: the lengths of its dimensions.
            dtype: torch's default dtype, unless another is named.
        """
        dtype = dtype or torch.get_default_dtype()
        count = math.prod(size)
        if any(length < 0 for length in size):
            raise ValueError(f"empty: expected sizes of at least 0, got {size}")
        if count == 0:
            return torch.empty(size, dtype=dtype, device="cpu")
        data = self.allocator.allocate(self.index, count * dtype.itemsize, HOST_STREAM)
        block = bytes_over(data, count * dtype.itemsize, self.allocator.free, data)
        return block.view(dtype).view(size)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a pinned copy of a CPU tensor."""
        if tensor.device.type != "cpu":
            raise ValueError(f"copy: expected a CPU tensor, got one on {tensor.device}")
        return self.empty(*tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def record_stream(self, tensor: torch.Tensor, stream: Any = None) -> None:
        """Say that a stream reads or writes the tensor without waiting.

        It has to be called for each copy with `non_blocking=True`: torch does so for the pinned
        tensors of its own cache alone.

        Args:
            tensor: a tensor of this cache, or a view of one.
            stream: a stream of this device; the current one, unless another is named.
        """
        stream = getattr(torch, self.kind).current_stream(self.index) if stream is None else stream
        device = getattr(stream, "device", None)
        if device is not None and device != torch.device(self.kind, self.index):
            raise ValueError(
                f"record_stream: this memory is of {self.kind}:{self.index}, the stream of {device}"
            )
        handle = int(stream.cuda_stream if self.kind == "cuda" else stream.sycl_queue)
        self.allocator.record_stream(tensor.untyped_storage().data_ptr(), handle)

    def memory_stats(self) -> dict[str, int]:
        """Counts under the keys of `torch.cuda.memory_stats`."""
        return self.allocator.statistics(self.index)

    def empty_cache(self) -> None:
        """Gives the system what no tensor needs, and waits for the device's work to that end."""
        self.allocator.empty_cache(self.index)


_caches: dict[str, _core.Allocator] = {}
_lock = threading.Lock()


def pinned(device: torch.device | str = "cuda") -> PinnedMemory:
    """Returns the cache of pinned memory for a device.

    Args:
        device: a CUDA or XPU device; without a number the current one.

    Raises:
        RuntimeError: torch is built without it.
        MemoryLibraryError: there is no such device.
    """
    chosen = device_of(device)
    if chosen.type not in ("cuda", "xpu"):
        raise ValueError(f"pinned: expected a cuda or xpu device, got {device}")
    check_device(chosen.type)
    with _lock:
        if chosen.type not in _caches:
            of = _sources.cuda() if chosen.type == "cuda" else _sources.xpu()
            if chosen.type == "xpu":
                _sources.give_queues(of)
            _caches[chosen.type] = over(of)
    module = getattr(torch, chosen.type)
    index = int(module.current_device()) if chosen.index is None else chosen.index
    return PinnedMemory(_caches[chosen.type], chosen.type, index)


def over(source: _core.Source) -> _core.Allocator:
    """An allocator of the pinned memory of a source's devices."""
    table = _core.Source()
    library = _core.library()
    _core.check(library.oxytorch_memory_pinned_source(ctypes.byref(source), ctypes.byref(table)))
    return _core.Allocator(table, "native")
