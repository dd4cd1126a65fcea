"""The allocator's C interface (allocator.h) from Python. No torch in it."""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..core.c_members import members
from .errors import MemoryLibraryError, OutOfMemoryError

PATH = Path(__file__).parents[1] / "lib" / "liboxytorch_memory.so"
POLICIES = ("native", "mapped", "expandable")
CALLS = (
    "allocate",
    "release",
    "reserve",
    "unreserve",
    "create",
    "destroy",
    "map",
    "unmap",
    "grant",
    "record",
    "query",
    "wait",
)
_OK, _OUT, _TOO_SMALL = 0, 1, 5
_MOST_STATISTICS = 256


class Source(ctypes.Structure):
    """oxytorch_memory_source: a table of functions."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("context", ctypes.c_void_p),
        ("granularity", ctypes.c_size_t),
        ("devices", ctypes.c_int),
        *members(ctypes.c_void_p, *CALLS),
        *members(ctypes.c_void_p, "forget", "is_capturing", "memory_info", "synchronize"),
        *members(ctypes.c_void_p, "allocate_host", "release_host"),
    )


class _Fake(ctypes.Structure):
    _fields_ = (
        ("devices", ctypes.c_int),
        *members(ctypes.c_size_t, "granularity", "total_bytes"),
        ("event_delay", ctypes.c_int64),
    )


class _FakeCounts(ctypes.Structure):
    _fields_ = (
        ("calls", ctypes.c_uint64 * len(CALLS)),
        *members(ctypes.c_uint64, "held_bytes", "peak_bytes", "mapped_bytes", "mistakes"),
    )


class AllocatorStep(ctypes.Structure):
    """oxytorch_memory_step: one call of many that `Allocator.run` makes."""

    _fields_ = (
        ("what", ctypes.c_int32),
        ("block", ctypes.c_uint32),
        *members(ctypes.c_uint64, "bytes", "stream"),
    )


LISTENER = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
)
TAKES = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


@functools.cache
def library() -> ctypes.CDLL:
    """The library; its functions are called without Python's lock."""
    if not PATH.exists():
        raise MemoryLibraryError(f"the compiled library is missing ({PATH}); reinstall oxytorch")
    try:
        loaded = ctypes.CDLL(str(PATH))
    except OSError as error:
        raise MemoryLibraryError(f"{PATH} cannot be loaded: {error}") from error
    loaded.oxytorch_memory_create.restype = ctypes.c_void_p
    loaded.oxytorch_memory_fake_page.restype = ctypes.c_uint64
    for name in ("error", "statistic_names", "fake_mistake"):
        getattr(loaded, f"oxytorch_memory_{name}").restype = ctypes.c_char_p
    return loaded


def check(result: int) -> None:
    """Raises what a function of the library has reported."""
    if result == _OK:
        return
    text = library().oxytorch_memory_error().decode()
    raise OutOfMemoryError(text) if result == _OUT else MemoryLibraryError(text)


@functools.cache
def statistic_names() -> tuple[str, ...]:
    """torch's keys, in the order of the library's values."""
    return tuple(library().oxytorch_memory_statistic_names().decode().split("\n"))


class Fake:
    """The source of numbers in place of memory.

    Args:
        total_bytes: what each device has.
        granularity: bytes of a physical page; 0: it cannot map.
        devices: how many there are.
        event_delay: calls of the source until an event has happened; -1: until it is waited for.
    """

    def __init__(
        self,
        total_bytes: int,
        *,
        granularity: int = 2 << 20,
        devices: int = 1,
        event_delay: int = 0,
    ) -> None:
        self.table = Source()
        settings = _Fake(devices, granularity, total_bytes, event_delay)
        library().oxytorch_memory_fake_source(ctypes.byref(settings), ctypes.byref(self.table))

    def counts(self) -> dict[str, int]:
        """How often each function was called, and the bytes that it holds."""
        counts = _FakeCounts()
        library().oxytorch_memory_fake_count(ctypes.byref(self.table), ctypes.byref(counts))
        found = dict(zip(CALLS, counts.calls, strict=True))
        for name in ("held_bytes", "peak_bytes", "mapped_bytes", "mistakes"):
            found[name] = getattr(counts, name)
        return found

    def fail_every(self, every: int) -> None:
        """Makes each so many-th call fail that can; 0: none."""
        library().oxytorch_memory_fake_fail(ctypes.byref(self.table), ctypes.c_uint64(every))

    def page(self, address: int, device: int = 0) -> int:
        """A number of the physical granule that is mapped there and may be used; 0: none."""
        page: int = library().oxytorch_memory_fake_page(
            ctypes.byref(self.table), device, ctypes.c_void_p(address)
        )
        return page

    def mistake(self) -> str:
        """The first call that a driver would refuse."""
        text: bytes = library().oxytorch_memory_fake_mistake(ctypes.byref(self.table))
        return text.decode()

    def end(self) -> None:
        """Frees its own memory; the allocator over it has to be closed before."""
        library().oxytorch_memory_fake_end(ctypes.byref(self.table))


class Allocator:
    """An allocator over a source.

    Args:
        table: the source; whatever its functions need has to live as long as the allocator.
        policy: one of POLICIES.
    """

    def __init__(self, table: Source, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
        self._library = library()
        self.devices = int(table.devices)
        handle = self._library.oxytorch_memory_create(ctypes.byref(table), POLICIES.index(policy))
        if not handle:
            raise MemoryLibraryError(self._library.oxytorch_memory_error().decode())
        self.handle = ctypes.c_void_p(handle)
        self._listener: Any = None

    def close(self) -> None:
        """Gives everything back to the source, live blocks too."""
        if self.handle:
            self._library.oxytorch_memory_destroy(self.handle)
            self.handle = ctypes.c_void_p(None)

    def allocate(self, device: int, size: int, stream: int = 0) -> int:
        """The address of a new block; 0 for no bytes."""
        data = ctypes.c_void_p()
        check(
            self._library.oxytorch_memory_allocate(
                self.handle,
                device,
                ctypes.c_size_t(size),
                ctypes.c_void_p(stream),
                ctypes.byref(data),
            )
        )
        return data.value or 0

    def free(self, data: int) -> None:
        """The block may be used again, in the order of its streams."""
        check(self._library.oxytorch_memory_free(self.handle, ctypes.c_void_p(data)))

    def find(self, inside: int) -> tuple[int, int]:
        """Where the live block that an address lies in begins, and its bytes."""
        data, size = ctypes.c_void_p(), ctypes.c_size_t()
        check(
            self._library.oxytorch_memory_find(
                self.handle, ctypes.c_void_p(inside), ctypes.byref(data), ctypes.byref(size)
            )
        )
        return data.value or 0, size.value

    def record_stream(self, data: int, stream: int) -> None:
        """`stream` uses the block too."""
        check(
            self._library.oxytorch_memory_record_stream(
                self.handle, ctypes.c_void_p(data), ctypes.c_void_p(stream)
            )
        )

    def empty_cache(self, device: int = -1) -> None:
        """Gives the source what no live block needs."""
        check(self._library.oxytorch_memory_empty_cache(self.handle, device))

    def set_limit(self, device: int, size: int) -> None:
        """The most bytes that are taken from the source; 0: no limit."""
        check(self._library.oxytorch_memory_set_limit(self.handle, device, ctypes.c_size_t(size)))

    def memory_info(self, device: int) -> tuple[int, int]:
        """Free and total bytes of the device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        check(
            self._library.oxytorch_memory_info(
                self.handle, device, ctypes.byref(free), ctypes.byref(total)
            )
        )
        return free.value, total.value

    def begin_pool(self, device: int, identity: tuple[int, int], takes: Any) -> None:
        """Requests on streams for which `takes` (a TAKES) says 1 go to a private pool."""
        pair = (ctypes.c_uint64 * 2)(*identity)
        check(self._library.oxytorch_memory_begin_pool(self.handle, device, pair, takes, None))

    def end_pool(self, device: int, identity: tuple[int, int]) -> None:
        """Ends what begin_pool began."""
        pair = (ctypes.c_uint64 * 2)(*identity)
        check(self._library.oxytorch_memory_end_pool(self.handle, device, pair))

    def release_pool(self, device: int, identity: tuple[int, int]) -> None:
        """No graph uses the pool any more."""
        pair = (ctypes.c_uint64 * 2)(*identity)
        check(self._library.oxytorch_memory_release_pool(self.handle, device, pair))

    def statistics(self, device: int) -> dict[str, int]:
        """The counts under torch's keys."""
        values = (ctypes.c_int64 * _MOST_STATISTICS)()
        count = self._library.oxytorch_memory_statistics(
            self.handle, device, values, _MOST_STATISTICS
        )
        return dict(zip(statistic_names(), values[:count], strict=True))

    def reset_peaks(self, device: int) -> None:
        """Peaks become what is in use now."""
        check(self._library.oxytorch_memory_reset_peaks(self.handle, device))

    def reset_accumulated(self, device: int) -> None:
        """Sums over time become 0."""
        check(self._library.oxytorch_memory_reset_accumulated(self.handle, device))

    def snapshot(self, device: int) -> list[dict[str, Any]]:
        """Segments and their blocks, as torch.cuda.memory_snapshot() has them."""
        segments: list[dict[str, Any]] = json.loads(
            self._text(self._library.oxytorch_memory_snapshot, device)
        )
        for segment in segments:
            segment["segment_pool_id"] = tuple(segment["segment_pool_id"])
        return segments

    def report(self, device: int, asked: int) -> str:
        """What is held and what to do, for a request that failed."""
        return self._text(self._library.oxytorch_memory_report, device, ctypes.c_size_t(asked))

    def run(
        self, device: int, steps: Sequence[AllocatorStep], blocks: int, *, timed: bool = False
    ) -> tuple[int, list[int]]:
        """Makes all calls in one; `steps` is best an array of Step.

        Returns how many were made before memory ran out, and the nanoseconds of each if `timed`.
        """
        array = steps if isinstance(steps, ctypes.Array) else (AllocatorStep * len(steps))(*steps)
        live = (ctypes.c_void_p * blocks)()
        times = (ctypes.c_uint64 * len(array))() if timed else None
        done = ctypes.c_size_t()
        result = self._library.oxytorch_memory_run(
            self.handle,
            device,
            array,
            ctypes.c_size_t(len(array)),
            live,
            ctypes.c_size_t(blocks),
            ctypes.byref(done),
            times,
        )
        if result != _OUT:
            check(result)
        return done.value, list(times[: done.value]) if times is not None else []

    def listen(self, listener: Callable[..., None] | None) -> None:
        """Calls `listener(context, event, device, data, bytes, stream)` at each event."""
        self._listener = LISTENER(listener) if listener else None
        self._library.oxytorch_memory_listen(self.handle, self._listener, None)

    def _text(self, function: Any, device: int, *arguments: Any) -> str:
        needed = ctypes.c_size_t()
        size = 1 << 16
        while True:
            text = ctypes.create_string_buffer(size)
            result = function(
                self.handle, device, *arguments, text, ctypes.c_size_t(size), ctypes.byref(needed)
            )
            if result != _TOO_SMALL:
                check(result)
                return text.value.decode()
            size = 2 * needed.value
