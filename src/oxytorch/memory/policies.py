"""The allocator core under a policy, over a source that has numbers in place of memory."""

from __future__ import annotations

import ctypes
import json
from ctypes import byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

from .. import _library

PATH = _library.PATH.with_name("liboxytorch_memory.so")
POLICIES = {"native-policy": 0, "oxytorch": 1, "expandable": 2}
PAGE = 2 << 20
ALLOCATE, FREE, EMPTY_CACHE = 0, 1, 3

_OK, _OUT = 0, 1
_CALLS = [
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
]
_FUNCTIONS = [
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
    "forget",
    "is_capturing",
    "memory_info",
]


class _Source(ctypes.Structure):
    _fields_ = [
        ("context", c_void_p),
        ("granularity", c_size_t),
        ("devices", c_int),
        *((name, c_void_p) for name in _FUNCTIONS),
    ]


class _Fake(ctypes.Structure):
    _fields_ = [
        ("devices", c_int),
        ("granularity", c_size_t),
        ("total_bytes", c_size_t),
        ("event_delay", c_int64),
    ]


class _Counts(ctypes.Structure):
    _fields_ = [
        ("calls", c_uint64 * len(_CALLS)),
        ("held_bytes", c_uint64),
        ("peak_bytes", c_uint64),
        ("mapped_bytes", c_uint64),
        ("mistakes", c_uint64),
    ]


class Step(ctypes.Structure):
    """One call of the allocator; `block` is where its pointer is kept meanwhile."""

    _fields_ = [("what", c_int32), ("block", c_uint32), ("bytes", c_uint64), ("stream", c_uint64)]


@cache
def _core() -> Any:
    if not PATH.is_file():
        raise RuntimeError(f"oxytorch.memory: {PATH.name} is missing: build or reinstall oxytorch")
    core = ctypes.CDLL(str(PATH))
    core.oxytorch_memory_create.restype = c_void_p
    core.oxytorch_memory_create.argtypes = [c_void_p, c_int]
    core.oxytorch_memory_destroy.argtypes = [c_void_p]
    core.oxytorch_memory_error.restype = c_char_p
    core.oxytorch_memory_fake_mistake.restype = c_char_p
    core.oxytorch_memory_run.argtypes = [
        c_void_p, c_int, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p
    ]  # fmt: skip
    core.oxytorch_memory_snapshot.argtypes = [c_void_p, c_int, c_void_p, c_size_t, c_void_p]
    core.oxytorch_memory_report.argtypes = [
        c_void_p, c_int, c_size_t, c_void_p, c_size_t, c_void_p
    ]  # fmt: skip
    return core


@dataclass(frozen=True)
class Counts:
    """Calls of the driver by name, and what was taken from it."""

    calls: dict[str, int]
    held: int
    peak: int


class Policy:
    """An allocator over a device of `total` bytes, for one trace.

    name: one of POLICIES. blocks: how many allocations there will be.
    """

    def __init__(self, name: str, total: int, blocks: int) -> None:
        self._core = _core()
        self._source = _Source()
        fake = _Fake(1, PAGE, total, 0)
        self._must(self._core.oxytorch_memory_fake_source(byref(fake), byref(self._source)))
        self._memory = self._core.oxytorch_memory_create(byref(self._source), POLICIES[name])
        if not self._memory:
            raise RuntimeError(self._core.oxytorch_memory_error().decode())
        self._blocks, self._count = (c_void_p * max(1, blocks))(), blocks

    def __enter__(self) -> Policy:
        return self

    def __exit__(self, *error: object) -> None:
        self._core.oxytorch_memory_destroy(self._memory)
        self._core.oxytorch_memory_fake_end(byref(self._source))

    def run(self, steps: Any, first: int, count: int, times: Any = None) -> int:
        """Make some of the steps; returns how many were made, fewer where memory ran out.

        times: an array of c_uint64 for the time of each step in ns.
        """
        done = c_size_t()
        start = ctypes.addressof(steps) + first * ctypes.sizeof(Step)
        clock = None if times is None else ctypes.addressof(times) + 8 * first
        status = self._core.oxytorch_memory_run(
            self._memory, 0, start, count, self._blocks, self._count, byref(done), clock
        )
        if status not in (_OK, _OUT):
            self._must(status)
        return done.value

    def address(self, block: int) -> int:
        """Where a live block lies."""
        return int(self._blocks[block] or 0)

    def counts(self) -> Counts:
        """What the driver was asked for so far."""
        found = _Counts()
        self._must(self._core.oxytorch_memory_fake_count(byref(self._source), byref(found)))
        if found.mistakes:
            text = self._core.oxytorch_memory_fake_mistake(byref(self._source)).decode()
            raise RuntimeError(f"the allocator core made a mistake: {text}. Please report it")
        calls = dict(zip(_CALLS, found.calls, strict=True))
        return Counts(calls, int(found.held_bytes), int(found.peak_bytes))

    def segments(self) -> list[dict[str, Any]]:
        """What is held, in the schema of `torch.cuda.memory_snapshot()`."""
        text = self._text(self._core.oxytorch_memory_snapshot, self._memory, 0)
        found: list[dict[str, Any]] = json.loads(text)
        return found

    def report(self, size: int) -> str:
        """What the core says of a request that failed."""
        return self._text(self._core.oxytorch_memory_report, self._memory, 0, size)

    def _text(self, function: Any, *arguments: Any) -> str:
        needed = c_size_t()
        function(*arguments, None, 0, byref(needed))
        buffer = ctypes.create_string_buffer(needed.value)
        self._must(function(*arguments, buffer, needed.value, byref(needed)))
        return buffer.value.decode()

    def _must(self, status: int) -> None:
        if status != _OK:
            raise RuntimeError(self._core.oxytorch_memory_error().decode())
