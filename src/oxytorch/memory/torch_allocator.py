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
from . import _core, _sources
from .errors import MemoryLibraryError

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

_POLICIES = {"cuda": "mapped", "xpu": "native", "cpu": "expandable"}
"""What each kind of device is served by unless a policy is named."""

_installed: dict[str, Installed] = {}
_lock = threading.Lock()


def kind_of(call: str, device: torch.device | str, kinds: tuple[str, ...]) -> str:
    """Which of the kinds a device is, which stands for all devices of its kind."""
    kind, _, number = str(device).partition(":")
    choices = f"{', '.join(map(repr, kinds[:-1]))} or {kinds[-1]!r}"
    if kind not in kinds:
        raise ValueError(f"{call}: expected device {choices}, got {str(device)!r}")
    if number and (kind, number) != ("cpu", "0"):
        raise ValueError(
            f"{call}: expected {kind!r}, all devices of that kind, got {str(device)!r}; "
            "oxytorch.memory.set_memory_limit limits one of them"
        )
    return kind


Device = torch.device | int | str | None


def device_of(device: Device) -> torch.device:
    """The device that a user means: a number is a CUDA device's, None is "cuda"."""
    try:
        if isinstance(device, int) and not isinstance(device, bool):
            return torch.device(f"cuda:{device}")
        if device is not None and not isinstance(device, str | torch.device):
            raise TypeError(f"{type(device).__name__} is no device")
        return torch.device("cuda" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            "device: expected a torch device, its name such as 'cuda:0' or 'cpu', or the number of "
            f"a CUDA device, got {device!r}"
        ) from error


def installed(device: str) -> Installed | None:
    """The allocator that `use` or `pool` has made for a kind of device; None: there is none."""
    return _installed.get(device)


def use(device: torch.device | str = "cuda", *, policy: str | None = None) -> None:
    """Makes this allocator torch's allocator of a kind of device.

    "cuda", "xpu": until the process ends. It has to be called before anything is allocated
    there; a second call with the same arguments does nothing. torch's own statistics
    (`torch.cuda.memory_allocated`) do not see pluggable allocators: use
    `oxytorch.memory.memory_allocated` and its like. "xpu" initializes the devices.

    "cpu": at any time, until `restore("cpu")`. Tensors of 1 MiB or more then get huge
    pages that stay mapped when the tensor is freed. For that two entries of the table through which
    torch's library libc10.so calls the C library (`posix_memalign`, `free`) are replaced.

    Args:
        device: "cuda", "xpu" or "cpu".
        policy: "mapped", which makes large blocks of free pages from anywhere; "native" or
            "expandable", which do what torch does. None: "mapped" for CUDA, "expandable" on the
            CPU and "native" for XPU, where memory cannot be mapped.

    Raises:
        RuntimeError: torch has allocated there already, or is not built for it.
        MemoryLibraryError: there is no such device.
    """
    device = kind_of("use", device, ("cuda", "xpu", "cpu"))
    policy = _policy_of("use", device, policy)
    if device == "cpu":
        _use_host(policy)
        return
    check_device(device)
    with _lock:
        before = _installed.get(device)
        if before is not None and before.whole_process:
            if before.policy != policy:
                raise RuntimeError(
                    f"use({device!r}, policy={policy!r}): policy {before.policy!r} is in use, and "
                    "torch changes its allocator once only; start a new process"
                )
            return
        module = getattr(torch, device)
        if module.is_initialized():
            raise RuntimeError(
                f"use({device!r}): torch has begun to use the device; call it before the first "
                "tensor or model is made there"
            )
        made = _make(device, policy, whole_process=True)
        module.memory.change_current_allocator(made.torch_allocator)
        _installed[device] = made
        if device == "xpu":
            module.init()
            _sources.give_queues(_sources.xpu())


def _policy_of(call: str, device: str, policy: str | None) -> str:
    if policy is None:
        return _POLICIES[device]
    if policy not in _core.POLICIES:
        raise ValueError(
            f"{call}: policy: expected one of {', '.join(_core.POLICIES)}, got {policy!r}; "
            f"leave it out for {_POLICIES[device]!r}"
        )
    return policy


def _use_host(policy: str) -> None:
    if policy == "mapped":
        raise ValueError(
            "use: policy: expected 'expandable' or 'native' for 'cpu', got 'mapped', which maps "
            "pages of a device; leave policy out for 'expandable'"
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


def restore(device: torch.device | str = "cpu") -> None:
    """New CPU tensors come from malloc again; those that are there stay where they are.

    For "cuda" and "xpu" torch has no way back.
    """
    if kind_of("restore", device, ("cpu", "cuda", "xpu")) != "cpu":
        raise ValueError(
            f"restore: expected device 'cpu', got {str(device)!r}; torch takes another allocator "
            "for a device once only"
        )
    _core.library().oxytorch_memory_host_end()


@contextlib.contextmanager
def pool(device: torch.device | str = "cuda", *, policy: str | None = None) -> Iterator[Any]:
    """In it, this thread's allocations come from a pool of their own over this allocator.

    torch's native allocator stays on top: it splits and keeps what it takes from the pool as
    segments, and its statistics count them. Backward passes run in threads of their own, whose
    allocations are not the pool's, except under `torch.autograd.set_multithreading_enabled(False)`.

    Yields:
        The `MemPool` of torch. Its memory is given back once the pool and all its tensors are
        gone.
    """
    device = kind_of("pool", device, ("cuda", "xpu"))
    policy = _policy_of("pool", device, policy)
    check_device(device)
    module = getattr(torch, device)
    with _lock:
        made = _installed.get(device)
        if made is None:
            made = _installed[device] = _make(device, policy, whole_process=False)
            if device == "xpu":
                _sources.give_queues(_sources.xpu())
        elif made.whole_process:
            raise RuntimeError(
                "pool: this allocator is torch's own already, by use(); there is nothing to change"
            )
        elif made.policy != policy:
            raise ValueError(f"pool: the first pool has policy {made.policy!r}, got {policy!r}")
    memory_pool = module.memory.MemPool(allocator=made.torch_allocator.allocator())
    with module.memory.use_mem_pool(memory_pool):
        yield memory_pool


def check_device(device: str) -> None:
    is_built = torch.version.cuda is not None if device == "cuda" else torch.xpu._is_compiled()
    if not is_built:
        raise RuntimeError(
            f"{device}: torch {torch.__version__} is built without {device.upper()}; install a "
            "build that has it"
        )
    if device == "xpu" and not hasattr(torch.xpu.memory, "XPUPluggableAllocator"):
        raise RuntimeError(
            f"xpu: torch {torch.__version__} takes no allocator of others for XPU; upgrade torch"
        )


def _make(device: str, policy: str, *, whole_process: bool) -> Installed:
    library = _core.library()
    table = _sources.cuda() if device == "cuda" else _sources.xpu()
    allocator = _core.Allocator(table, policy)
    knows_torch = _library.torch_version() <= _library.NEWEST_TORCH
    library.oxytorch_memory_install(allocator.handle, int(knows_torch))
    pluggable = getattr(getattr(torch, device).memory, f"{device.upper()}PluggableAllocator")
    torch_allocator = pluggable(
        str(_core.PATH), "oxytorch_memory_torch_malloc", "oxytorch_memory_torch_free"
    )
    if whole_process:
        target = torch_allocator.allocator()
        if device == "cuda":
            _set_functions(library, target)
        elif hasattr(target, "set_record_stream_fn"):
            target.set_record_stream_fn(_address(library, "record_stream"))
        else:
            _replace_record_stream(allocator)
    return Installed(device, policy, allocator, torch_allocator, whole_process)


def _set_functions(library: Any, target: Any) -> None:
    missing = [setter for setter in _SETTERS if not hasattr(target, setter)]
    if missing:
        raise RuntimeError(
            f"torch {torch.__version__} cannot tell an allocator of {missing[0]}; "
            "upgrade torch, or use oxytorch.memory.pool()"
        )
    for setter, name in _SETTERS.items():
        getattr(target, setter)(_address(library, name))


def _address(library: Any, name: str) -> int | None:
    function = getattr(library, f"oxytorch_memory_torch_{name}")
    return ctypes.cast(function, ctypes.c_void_p).value


_operators: list[torch.library.Library] = []


def _replace_record_stream(allocator: _core.Allocator) -> None:
    """Tells our allocator of `Tensor.record_stream` on XPU, of which torch tells it nothing."""

    def record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
        own = torch.xpu.Stream(  # type: ignore[no-untyped-call]
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )
        with contextlib.suppress(MemoryLibraryError):  # memory of others: torch ignores it too
            allocator.record_stream(tensor.untyped_storage().data_ptr(), int(own.sycl_queue))

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("record_stream", record_stream, "XPU")  # type: ignore[no-untyped-call]
    _operators.append(library)
