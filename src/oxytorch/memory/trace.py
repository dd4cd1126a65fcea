"""Traces of allocations: what a program asked of an allocator, and when. One file each.

A file is the magic, a version, the length and the sha256 of what follows, a description (JSON), and
columns of numbers, each compressed. It holds no code, and all of it is checked
before it is used.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..core.whole_file import check_destination, replacing

MAGIC = b"oxytrace"
VERSION = 1
ROUNDING = 512
"""Every stock allocator rounds sizes up to a multiple of this many bytes."""

_HEAD = struct.Struct("<8sII32s")
_MOST = 1 << 62
_MOST_EVENTS = 1 << 28
_MOST_DESCRIPTION = 1 << 28


class TraceError(ValueError):
    """A file that is no whole trace; the text names the file and what is wrong with it."""


class Kind(enum.IntEnum):
    """What happened.

    ALLOC: memory was asked for. FREE: it was given back, and can be used again at once. RETIRE: it
    was given back while other streams still used it (`record_stream`). REUSE: these have finished.
    RELEASE: the program had the allocator give back what it had cached (`empty_cache`).
    """

    ALLOC = 0
    FREE = 1
    RETIRE = 2
    REUSE = 3
    RELEASE = 4


@dataclass(frozen=True)
class Queue:
    """Where an allocation belongs: cached memory serves the same queue again.

    stream: the stream's number, 0 for the default one.
    pool: torch's id of the memory pool (CUDA graphs and `torch.cuda.MemPool` have their own).
    """

    stream: int = 0
    pool: tuple[int, int] = (0, 0)


@dataclass
class About:
    """Where a trace comes from, and what torch itself measured meanwhile.

    Numbers are bytes, and None where they are not known: a file of torch's own has few of them.
    """

    program: str = ""
    device: str = ""
    total_memory: int | None = None
    limit: int | None = None
    """What `torch.cuda.set_per_process_memory_fraction` allowed; None where it was not set."""
    torch: str = ""
    settings: str = ""
    is_expandable: bool = False
    initial_bytes: int = 0
    """Held when the recording began."""
    lost: int = 0
    """Events at the beginning that torch's history had no room for."""
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    device_allocations: int | None = None
    retries: int | None = None


@dataclass
class Trace:
    """Events in their order, by column; allocations by column, in the order of their ALLOC.

    kinds: of each event.
    which: the number of each event's allocation, -1 for RELEASE.
    times: of each event in us from the first.
    sizes: bytes asked for, of each allocation.
    queues: the index of each one's `Queue`.
    places: the index in `sites` of the line of code that asked, -1 where it is not known.
    marks: texts that the program set, with the number of events before each.
    """

    about: About = field(default_factory=About)
    kinds: array[int] = field(default_factory=lambda: array("B"))
    which: array[int] = field(default_factory=lambda: array("q"))
    times: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    queues: array[int] = field(default_factory=lambda: array("q"))
    places: array[int] = field(default_factory=lambda: array("q"))
    queue_list: list[Queue] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.kinds)

    def alloc(self, size: int, queue: int = 0, time: int = 0, place: int = -1) -> int:
        """Add an ALLOC; returns the allocation's number."""
        if not self.queue_list:
            self.queue_list.append(Queue())
        number = len(self.sizes)
        self.sizes.append(size)
        self.queues.append(queue)
        self.places.append(place)
        self.event(Kind.ALLOC, number, time)
        return number

    def event(self, kind: Kind, number: int, time: int = 0) -> None:
        """Add an event of an allocation that exists."""
        self.kinds.append(kind)
        self.which.append(number)
        self.times.append(time)

    def mark(self, text: str) -> None:
        """Set a mark behind the last event."""
        self.marks.append((len(self), text))

    def check(self) -> None:
        """Raise a ValueError that says which event cannot have happened."""
        _check(self)


def rounded(size: int) -> int:
    """What an allocation of so many bytes counts for."""
    return max(ROUNDING, -(-size // ROUNDING) * ROUNDING)


@dataclass(frozen=True)
class Peak:
    """The most that was held at once, each allocation counted as `rounded`.

    allocated: not yet given back.
    active: not yet reusable, which is more with several streams.
    event: the number of the first event after which `allocated` had its peak.
    """

    allocated: int
    active: int
    event: int


def peak(trace: Trace) -> Peak:
    """The peaks of a trace, whatever allocator serves it."""
    allocated = active = most = most_active = 0
    at = -1
    for index, (kind, number) in enumerate(zip(trace.kinds, trace.which, strict=True)):
        if kind == Kind.RELEASE:
            continue
        size = rounded(trace.sizes[number])
        if kind == Kind.ALLOC:
            allocated += size
            active += size
            most_active = max(most_active, active)
            if allocated > most:
                most, at = allocated, index
        else:
            allocated -= size if kind != Kind.REUSE else 0
            active -= size if kind != Kind.RETIRE else 0
    return Peak(most, most_active, at)


def live_after(trace: Trace, event: int) -> list[int]:
    """The allocations that are not yet given back after an event, in their order."""
    live: dict[int, None] = {}
    for kind, number in zip(trace.kinds[: event + 1], trace.which[: event + 1], strict=True):
        if kind == Kind.ALLOC:
            live[number] = None
        elif kind in (Kind.FREE, Kind.RETIRE):
            del live[number]
    return [*live]


def holders(trace: Trace, count: int = 10, event: int | None = None) -> list[tuple[int, int, str]]:
    """The lines of code that hold most after an event, by default at the peak.

    Of each: bytes, allocations and the line.
    """
    found: dict[int, list[int]] = {}
    for number in live_after(trace, peak(trace).event if event is None else event):
        held = found.setdefault(trace.places[number], [0, 0])
        held[0] += rounded(trace.sizes[number])
        held[1] += 1
    most = sorted(found.items(), key=lambda each: -each[1][0])[:count]
    return [
        (held[0], held[1], trace.sites[place] if place >= 0 else "(no Python code, as in backward)")
        for place, held in most
    ]


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace, in one step for other processes."""
    trace.check()
    columns = {name: _pack(column) for name, column in _columns(trace)}
    description = {
        "about": asdict(trace.about),
        "events": len(trace),
        "allocations": len(trace.sizes),
        "columns": {name: len(packed) for name, packed in columns.items()},
        "queues": [[queue.stream, *queue.pool] for queue in trace.queue_list],
        "sites": trace.sites,
        "marks": trace.marks,
    }
    head = zlib.compress(json.dumps(description).encode(), 9)
    content = struct.pack("<I", len(head)) + head + b"".join(columns.values())
    digest = hashlib.sha256(content).digest()
    with replacing(Path(path)) as file:
        file.write_bytes(_HEAD.pack(MAGIC, VERSION, 0, digest) + content)


def load(path: str | os.PathLike[str]) -> Trace:
    """Read a trace.

    Raises:
        TraceError: the file is none, is damaged, or is of a later version.
    """
    try:
        return _read(Path(path).read_bytes())
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, zlib.error) as error:
        raise TraceError(f"{path}: {_what(error)}") from error


def check_target(path: str | os.PathLike[str]) -> None:
    """Raise an OSError that says why a trace must not be written there; traces may be replaced."""
    target = Path(path)
    check_destination(target)
    if not target.exists():
        return
    if not target.is_file():
        raise FileExistsError(f"{path} is there and is no file; name a file to write the trace to")
    with target.open("rb") as file:
        found = file.read(len(MAGIC))
    if found not in (b"", MAGIC):
        raise FileExistsError(f"{path} is there and is no trace; name another file to write")


def load_trace(path: str | os.PathLike[str], device: int | None = None) -> Trace:
    """Read a trace, or a pickle that `torch.cuda.memory._dump_snapshot` wrote (none of its code
    runs).

    device: the number of the device whose trace is wanted, where a pickle has several.

    Raises:
        TraceError: the file is neither, is damaged, or is of a later version.
        TypeError: an argument of another type.
    """
    from . import snapshot

    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"load_trace: path: expected the name of a file, got {path!r}")
    if device is not None and (isinstance(device, bool) or not isinstance(device, int)):
        raise TypeError(
            f"load_trace: device: expected the number of a device, or None, got {device!r}"
        )
    with open(path, "rb") as file:
        is_trace = file.read(len(MAGIC)) == MAGIC
    if is_trace and device is not None:
        raise TraceError(
            f"{path}: a trace is of one device; a number chooses in torch's snapshots alone"
        )
    return load(path) if is_trace else snapshot.load(path, device)


def _what(error: Exception) -> str:
    if isinstance(error, TraceError):
        return str(error)
    return f"the trace's description is wrong: {type(error).__name__}: {error}"


def _columns(trace: Trace) -> Iterator[tuple[str, array[int]]]:
    yield "kinds", trace.kinds
    # Most allocations end soon: how many were made since, instead of which one it is.
    made, back = 0, array("q")
    for kind, number in zip(trace.kinds, trace.which, strict=True):
        made += kind == Kind.ALLOC
        back.append(made - number)
    yield "back", back
    times = trace.times
    yield "times", array("q", (b - a for a, b in pairwise([0, *times])))
    yield "sizes", trace.sizes
    yield "queues", trace.queues
    yield "places", trace.places


def _pack(column: array[int]) -> bytes:
    """The first byte of each number, then the second ..., which compresses best."""
    plain = array(column.typecode, column)
    if sys.byteorder == "big":
        plain.byteswap()
    data, width = plain.tobytes(), plain.itemsize
    return zlib.compress(b"".join(data[place::width] for place in range(width)), 9)


def _unpack(packed: bytes, count: int, typecode: str) -> array[int]:
    width = array(typecode).itemsize
    opened = zlib.decompressobj()
    data = opened.decompress(packed, count * width + 1)
    if len(data) != count * width or not opened.eof:
        raise TraceError(f"the trace has a column that does not have {count} values")
    mixed = bytearray(len(data))
    for place in range(width):
        mixed[place::width] = data[place * count : (place + 1) * count]
    column = array(typecode)
    column.frombytes(bytes(mixed))
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _read(data: bytes) -> Trace:
    if data[: len(MAGIC)] != MAGIC:
        raise TraceError(
            "expected a trace that oxytorch.memory.record wrote, or a pickle of "
            "torch.cuda.memory._snapshot()"
        )
    if len(data) < _HEAD.size + 4:
        raise TraceError("the trace is cut off")
    _, version, reserved, digest = _HEAD.unpack_from(data)
    if version != VERSION:
        raise TraceError(
            f"the trace has version {version}, this oxytorch reads {VERSION}: upgrade oxytorch"
        )
    if reserved:
        raise TraceError("the trace is damaged (bytes 12 to 15 are not zero)")
    content = memoryview(data)[_HEAD.size :]
    if hashlib.sha256(content).digest() != digest:
        raise TraceError("the trace is damaged or cut off (its checksum differs)")
    (length,) = struct.unpack_from("<I", content)
    opened = zlib.decompressobj()
    description = json.loads(opened.decompress(content[4 : 4 + length], _MOST_DESCRIPTION))
    trace = _described(description)
    events, allocations = description["events"], description["allocations"]
    if not 0 <= allocations <= events <= _MOST_EVENTS:
        raise TraceError(f"the trace says {events} events and {allocations} allocations")
    place = 4 + length
    found = {}
    for name, _ in _columns(Trace()):
        size = description["columns"][name]
        count = events if name in ("kinds", "back", "times") else allocations
        typecode = "B" if name == "kinds" else "q"
        found[name] = _unpack(bytes(content[place : place + size]), count, typecode)
        place += size
    trace.kinds, trace.sizes = found["kinds"], found["sizes"]
    trace.queues, trace.places = found["queues"], found["places"]
    made = time = 0
    for kind, back, step in zip(trace.kinds, found["back"], found["times"], strict=True):
        made += kind == Kind.ALLOC
        time += step
        trace.which.append(made - back)
        trace.times.append(time)
    trace.check()
    return trace


def _described(description: dict[str, Any]) -> Trace:
    given = description["about"]
    about = About(**{each.name: given[each.name] for each in fields(About) if each.name in given})
    for each in fields(About):
        value, usual = getattr(about, each.name), getattr(About(), each.name)
        wanted = int | None if usual is None else type(usual)
        if not isinstance(value, wanted) or (isinstance(value, int) and not 0 <= value < _MOST):
            raise TraceError(f"the trace has {each.name} {value!r}")
    queues = [
        Queue(int(stream), (int(first), int(second)))
        for stream, first, second in description["queues"]
    ]
    sites = [str(site) for site in description["sites"]]
    marks = [(int(index), str(text)) for index, text in description["marks"]]
    return Trace(about=about, queue_list=queues, sites=sites, marks=marks)


_AFTER = {Kind.FREE: Kind.ALLOC, Kind.RETIRE: Kind.ALLOC, Kind.REUSE: Kind.RETIRE}


def _check(trace: Trace) -> None:
    last, before = array("B", bytes(len(trace.sizes))), 0
    made = 0
    for index, (kind, number, time) in enumerate(
        zip(trace.kinds, trace.which, trace.times, strict=True)
    ):
        if kind > Kind.RELEASE:
            raise TraceError(f"event {index} has kind {kind}, which does not exist")
        if not before <= time < _MOST:
            raise TraceError(f"event {index} happens before the one in front of it")
        before = time
        if kind == Kind.RELEASE:
            continue
        if kind == Kind.ALLOC:
            if number != made:
                raise TraceError(f"event {index} makes allocation {number}, expected {made}")
            made += 1
        elif not 0 <= number < made or last[number] != _AFTER[Kind(kind)]:
            raise TraceError(
                f"event {index} is {Kind(kind).name} of allocation {number}, which is not there"
            )
        last[number] = kind
    if made != len(trace.sizes):
        raise TraceError(f"{made} allocations happen, {len(trace.sizes)} are listed")
    _check_allocations(trace)


def _check_allocations(trace: Trace) -> None:
    for name, column in (("size", trace.sizes), ("queue", trace.queues), ("place", trace.places)):
        if len(column) != len(trace.sizes):
            raise TraceError(f"expected a {name} for each allocation")
    least = {"size": 0, "queue": 0, "place": -1}
    most = {"size": 1 << 50, "queue": len(trace.queue_list), "place": len(trace.sites)}
    for name, column in (("size", trace.sizes), ("queue", trace.queues), ("place", trace.places)):
        for number, value in enumerate(column):
            if not least[name] <= value < most[name]:
                raise TraceError(f"allocation {number} has {name} {value}")
    if any(not 0 <= index <= len(trace) for index, _ in trace.marks):
        raise TraceError("a mark lies outside the trace")
