"""Makes our allocator torch's own: for the whole process, or for a block of code."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import _library
from . import _core

# Setters of torch's pluggable allocator, and what we set.
_SETTERS = {
    "set_init_fn": "init",
    "set_reset_fn": "empty_cache",
    "set_memory_fraction_fn": "set_fraction",
    "set_base_alloc_fn": "base",
    "set_record_stream_fn": "record_stream",
    "set_begin_allocate_to_pool": "begin_pool",
    "set_end_allocate_to_pool_fn": "end_pool",
    "set_release_pool": "release_pool",
}


@dataclass(frozen=True)
class Installed:
    """An allocator that torch calls."""

    device: str
    policy: str
    allocator: _core.Allocator
    torch_allocator: Any
    whole_process: bool


LEAST_HOST_BYTES = 1 << 20
"""CPU tensors below this come from malloc: its small blocks stay mapped."""

_installed: dict[str, Installed] = {}
_lock = threading.Lock()


def installed(device: str) -> Installed | None:
    """The allocator that `use` or `pool` has made for "cuda" or "cpu"; None: there is none."""
    return _installed.get(device)


def use(device: str = "cuda", *, policy: str | None = None) -> None:
    """Makes this allocator torch's allocator of a kind of device.

    "cuda": until the process ends. It has to be called before anything is allocated
    there; a second call with the same arguments does nothing. torch's own statistics
    (`torch.cuda.memory_allocated`) do not know pluggable allocators: ask
    `oxytorch.memory.memory_allocated` and its like.

    "cpu": at any time, until `restore("cpu")`. Tensors of 1 MiB or more are then taken of huge
    pages that stay mapped when the tensor is freed. For that two entries of the table through which
    torch's library libc10.so calls the C library (`posix_memalign`, `free`) are replaced.

    Args:
        device: "cuda" or "cpu".
        policy: "mapped", which puts large blocks together of free pages from anywhere; "native" or
            "expandable", which do what torch does. None: "mapped", and "expandable" on the CPU.

    Raises:
        RuntimeError: torch has allocated there already, or is not built for it.
        MemoryLibraryError: there is no such device.
    """
    device = str(device)
    if device == "cpu":
        _use_host(policy or "expandable")
        return
    policy = policy or "mapped"
    _check_device(device)
    with _lock:
        before = _installed.get(device)
        if before is not None and before.whole_process:
            if before.policy != policy:
                raise RuntimeError(
                    f"use({device!r}, policy={policy!r}): policy {before.policy!r} is in use, and "
                    "torch changes its allocator once only; start a new process"
                )
            return
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise RuntimeError(
                f"use({device!r}): torch has begun to use the device; call it before the first "
                "tensor or model is made there"
            )
        made = _make(device, policy, whole_process=True)
        torch.cuda.memory.change_current_allocator(made.torch_allocator)
        _installed[device] = made


def _use_host(policy: str) -> None:
    if policy == "mapped":
        raise ValueError(
            "policy: expected 'expandable' or 'native' on the CPU, got 'mapped'; the system has no "
            "physical pages to map twice"
        )
    library = _core.library()
    with _lock:
        made = _installed.get("cpu")
        if made is None:
            table = _core.Source()
            _core.check(library.oxytorch_memory_host_source(ctypes.byref(table)))
            allocator = _core.Allocator(table, policy)
            made = Installed("cpu", policy, allocator, None, True)
        elif made.policy != policy:
            raise RuntimeError(
                f"use('cpu', policy={policy!r}): this process began with policy {made.policy!r} "
                "there, which stays; start a new process for another"
            )
        _core.check(
            library.oxytorch_memory_host_begin(
                made.allocator.handle, ctypes.c_size_t(LEAST_HOST_BYTES)
            )
        )
        _installed["cpu"] = made


def restore(device: str = "cpu") -> None:
    """New CPU tensors come from malloc again; those that are there stay where they are.

    For "cuda" torch has no way back.
    """
    if device != "cpu":
        raise ValueError(
            f"restore: expected device 'cpu', got {device!r}; torch takes another allocator for a "
            "device once only"
        )
    _core.library().oxytorch_memory_host_end()


@contextlib.contextmanager
def pool(device: str = "cuda", *, policy: str = "mapped") -> Iterator[Any]:
    """In it, this thread's allocations come from a pool of their own over this allocator.

    torch's native allocator stays on top: it splits and keeps what it takes from the pool as
    segments, and its statistics count them. Backward passes run in threads of their own, whose
    allocations are not the pool's, except under `torch.autograd.set_multithreading_enabled(False)`.

    Yields:
        The `torch.cuda.MemPool`. Its memory is given back once the pool and all its tensors are
        gone.
    """
    if device != "cuda":
        raise ValueError(f"pool: expected device 'cuda', got {device!r}")
    _check_device(device)
    with _lock:
        made = _installed.get(device)
        if made is None:
            made = _installed[device] = _make(device, policy, whole_process=False)
        elif made.whole_process:
            raise RuntimeError(
                "pool: this allocator is torch's own already, by use(); there is nothing to change"
            )
        elif made.policy != policy:
            raise ValueError(f"pool: the first pool has policy {made.policy!r}, got {policy!r}")
    memory_pool = torch.cuda.MemPool(allocator=made.torch_allocator.allocator())
    with torch.cuda.use_mem_pool(memory_pool):
        yield memory_pool


def _check_device(device: str) -> None:
    if device == "xpu":
        raise NotImplementedError(
            "xpu: this allocator serves SYCL through its C interface (oxytorch_memory_sycl_source) "
            "alone; torch's allocator for XPU stays in use"
        )
    if device != "cuda":
        raise ValueError(f"device: expected 'cuda' or 'cpu', got {device!r}")
    if torch.version.cuda is None:
        raise RuntimeError(
            f"cuda: torch {torch.__version__} is built without CUDA; install a build that has it"
        )


def _make(device: str, policy: str, *, whole_process: bool) -> Installed:
    library = _core.library()
    table = _core.Source()
    _core.check(library.oxytorch_memory_cuda_source(ctypes.byref(table)))
    allocator = _core.Allocator(table, policy)
    knows_torch = _library.torch_version() <= _library.NEWEST_TORCH
    library.oxytorch_memory_install(allocator.handle, int(knows_torch))
    torch_allocator = torch.cuda.memory.CUDAPluggableAllocator(
        str(_core.PATH), "oxytorch_memory_torch_malloc", "oxytorch_memory_torch_free"
    )
    if whole_process:
        _set_functions(library, torch_allocator.allocator())  # type: ignore[no-untyped-call]
    return Installed(device, policy, allocator, torch_allocator, whole_process)


def _set_functions(library: Any, target: Any) -> None:
    missing = [setter for setter in _SETTERS if not hasattr(target, setter)]
    if missing:
        raise RuntimeError(
            f"torch {torch.__version__} cannot tell an allocator of {missing[0]}; "
            "upgrade torch, or use oxytorch.memory.pool()"
        )
    for setter, name in _SETTERS.items():
        function = getattr(library, f"oxytorch_memory_torch_{name}")
        getattr(target, setter)(ctypes.cast(function, ctypes.c_void_p).value)
