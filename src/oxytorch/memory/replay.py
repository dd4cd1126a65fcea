"""Replays traces through allocators, without a GPU, and measures what each would have reserved."""

from __future__ import annotations

import contextlib
import ctypes
import json
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import _core, offline
from .errors import OutOfMemoryError
from .stock import OutOfMemory, Settings, StockAllocator
from .trace import Kind, Trace, TraceError, live_after, peak, rounded

STANDARD = ("native-policy", "expandable", "oxytorch", "offline-bound")
NAMES = (*STANDARD, "offline-contiguous")
POINTS = 500
"""Points of a timeline."""
POLICIES = {"native-policy": "native", "expandable": "expandable", "oxytorch": "mapped"}
MOST_MEMORY = 1 << 44
"""Bytes that a device may have."""
_ALLOCATE, _FREE, _EMPTY_CACHE = 0, 1, 3
_DRIVER = (
    "allocate", "release", "reserve", "unreserve", "create", "destroy", "map", "unmap", "grant",
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """What was allocated and reserved after an event."""

    event: int
    allocated: int
    reserved: int


@dataclass(frozen=True)
class Range:
    """Addresses in a segment that belong together.

    number: of the allocation that holds them; None: they are cached.
    """

    segment: int
    offset: int
    size: int
    number: int | None


@dataclass
class Result:
    """What an allocator makes of a trace. Sizes are bytes.

    peak_allocated: the same for all, sizes rounded up to 512.
    calls: of the driver, by name.
    nanoseconds: the mean of an allocation or a free, without the driver's time; None where it is
        not our core that serves.
    failed: the event at which memory ran out, and why.
    timeline: by event.
    ranges: the map after the event of the peak.
    """

    allocator: str
    peak_allocated: int
    peak_reserved: int
    calls: dict[str, int] = field(default_factory=dict)
    nanoseconds: float | None = None
    failed: int | None = None
    reason: str = ""
    timeline: list[Point] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)

    @property
    def fragmentation(self) -> float:
        """The part of what was reserved at its peak that was never needed."""
        return 1 - self.peak_allocated / self.peak_reserved if self.peak_reserved else 0.0

    @property
    def driver_calls(self) -> int:
        """How often memory was taken from the device, mapped or given back."""
        return sum(self.calls.values())


def replay(
    trace: Trace, allocators: Iterable[str] = STANDARD, limit: int | None = None
) -> list[Result]:
    """Serve a trace by each of several allocators.

    allocators: of NAMES, or settings as in PYTORCH_ALLOC_CONF ("max_split_size_mb:128").
        native-policy: torch's default. expandable: torch's expandable segments. oxytorch: ours.
        offline-bound: the least that pages which can be mapped anywhere can do.
        offline-contiguous: a placement by an allocator that knows the trace beforehand.
    limit: bytes that the device has; None: as many as are asked for.

    Raises:
        ValueError: an allocator that does not exist, or a limit that no device has.
        TypeError: an argument of another type.
    """
    check_arguments("replay", trace, limit)
    if isinstance(allocators, str):
        raise TypeError(
            f"replay: allocators: expected several names, got {allocators!r}; for one of them "
            f"give [{allocators!r}]"
        )
    return [_replay(trace, each, limit) for each in allocators]


def check_arguments(call: str, trace: Trace, limit: int | None) -> None:
    """Raise where a trace is none or contradicts itself, or a limit is no number of bytes."""
    if not isinstance(trace, Trace):
        raise TypeError(
            f"{call}: trace: expected a Trace, got {type(trace).__name__}; "
            "oxytorch.memory.load_trace(path) reads one"
        )
    try:
        trace.check()
    except TraceError as error:
        raise TraceError(f"{call}: trace: {error}") from error
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise TypeError(
            f"{call}: limit: expected bytes as an integer, or None for no limit, got {limit!r}; "
            "24 GiB are 24 * 2**30"
        )
    if not 1 <= limit <= MOST_MEMORY:
        raise ValueError(
            f"{call}: limit: expected bytes from 1 to 2**44, or None for no limit, got {limit}"
        )


def _replay(trace: Trace, name: str, limit: int | None) -> Result:
    if not isinstance(name, str):
        raise TypeError(f"replay: allocators: expected names, got {name!r}")
    if name in POLICIES:
        return _by_policy(trace, name, limit)
    if name in NAMES:
        return _offline(trace, name, limit)
    if ":" not in name:
        raise ValueError(
            f"replay: expected allocators out of {', '.join(NAMES)}, or settings of "
            f"PYTORCH_ALLOC_CONF such as max_split_size_mb:128, got {name!r}"
        )
    try:
        settings = Settings.parse(name, limit)
    except ValueError as error:
        raise ValueError(f"replay: {name}: {error}") from error
    return by_stock(trace, settings, name)


def _by_policy(trace: Trace, name: str, limit: int | None) -> Result:
    found = peak(trace)
    steps, before = _steps(trace)
    result = Result(name, found.allocated, 0)
    with _Run(POLICIES[name], limit or MOST_MEMORY, steps, len(trace.sizes)) as run:
        counts = run.fake.counts()
        for event, allocated in _points(trace):
            run.go_to(before[event + 1])
            counts = run.fake.counts()
            if run.done < before[event + 1]:
                result.failed = bisect_right(before, run.done) - 1
                size = trace.sizes[trace.which[result.failed]]
                result.reason = run.allocator.report(0, size)
                break
            result.timeline.append(Point(event, allocated, counts["held_bytes"]))
            if event == found.event:
                result.ranges = _ranges(trace, event, run)
        result.peak_reserved = counts["peak_bytes"]
        result.calls = {name: counts[name] for name in _DRIVER}
        result.nanoseconds = statistics.fmean(run.times[: run.done]) if run.done else None
        if run.fake.mistake():
            raise RuntimeError(f"{name} made a mistake, please report it: {run.fake.mistake()}")
    return result


class _Run:
    """One of our policies over numbers in place of memory, some of the steps at a time.

    done: how many steps were made.
    times: of each, in ns.
    live: the addresses of live blocks.
    """

    def __init__(self, policy: str, total: int, steps: Any, blocks: int) -> None:
        self.fake = _core.Fake(total)
        self.allocator = _core.Allocator(self.fake.table, policy)
        self.steps, self.done = steps, 0
        self.live = (ctypes.c_void_p * max(1, blocks))()
        self.times = (ctypes.c_uint64 * max(1, len(steps)))()

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.allocator.close()
        self.fake.end()

    def go_to(self, step: int) -> None:
        """Make the steps before this one; fewer where memory runs out."""
        done = ctypes.c_size_t()
        start = ctypes.addressof(self.steps) + self.done * ctypes.sizeof(_core.AllocatorStep)
        result = _core.library().oxytorch_memory_run(
            self.allocator.handle,
            0,
            ctypes.c_void_p(start),
            ctypes.c_size_t(step - self.done),
            self.live,
            ctypes.c_size_t(len(self.live)),
            ctypes.byref(done),
            ctypes.c_void_p(ctypes.addressof(self.times) + 8 * self.done),
        )
        self.done += done.value
        with contextlib.suppress(OutOfMemoryError):
            _core.check(result)


def _steps(trace: Trace) -> tuple[Any, list[int]]:
    """The calls that an allocator gets, and how many there are before each event and in all.

    A block that other streams use comes free when they have finished, as in the recording.
    """
    what = {
        Kind.ALLOC: _ALLOCATE,
        Kind.FREE: _FREE,
        Kind.REUSE: _FREE,
        Kind.RELEASE: _EMPTY_CACHE,
    }
    calls, before = [], [0]
    for kind, number in zip(trace.kinds, trace.which, strict=True):
        if kind == Kind.ALLOC:
            queue = trace.queues[number]
            calls.append((_ALLOCATE, number, max(1, trace.sizes[number]), queue))
        elif kind != Kind.RETIRE:
            calls.append((what[Kind(kind)], max(0, number), 0, 0))
        before.append(len(calls))
    return (_core.AllocatorStep * len(calls))(
        *(_core.AllocatorStep(*call) for call in calls)
    ), before


def _points(trace: Trace) -> list[tuple[int, int]]:
    """Events with what is allocated after them: the highest of each stretch, and the last one."""
    stretch = max(1, len(trace) // POINTS)
    found: list[tuple[int, int]] = []
    allocated, best = 0, (-1, -1)
    for index, (kind, number) in enumerate(zip(trace.kinds, trace.which, strict=True)):
        if kind == Kind.ALLOC:
            allocated += rounded(trace.sizes[number])
        elif kind in (Kind.FREE, Kind.RETIRE):
            allocated -= rounded(trace.sizes[number])
        if allocated > best[1]:
            best = (index, allocated)
        if index % stretch == stretch - 1:
            found.append(best)
            best = (-1, -1)
    if len(trace) and (not found or found[-1][0] != len(trace) - 1):
        found.append((len(trace) - 1, allocated))
    return found


def _ranges(trace: Trace, event: int, run: _Run) -> list[Range]:
    numbers = {run.live[number]: number for number in live_after(trace, event)}
    found = []
    for index, segment in enumerate(run.allocator.snapshot(0)):
        for block in segment["blocks"]:
            offset = block["address"] - segment["address"]
            number = numbers.get(block["address"]) if block["state"] != "inactive" else None
            found.append(Range(index, offset, block["size"], number))
    return found


def by_stock(trace: Trace, settings: Settings, name: str) -> Result:
    """Serve a trace by a model of torch's own allocator under settings."""
    found = peak(trace)
    result = Result(name, found.allocated, 0)
    allocator = StockAllocator(settings)
    held: dict[int, Any] = {}
    points, place = _points(trace), 0
    for event, (kind, number) in enumerate(zip(trace.kinds, trace.which, strict=True)):
        if kind == Kind.ALLOC:
            try:
                held[number] = allocator.allocate(trace.sizes[number], trace.queues[number])
            except OutOfMemory as error:
                result.failed, result.reason = event, str(error)
                break
            result.peak_reserved = max(result.peak_reserved, allocator.reserved)
        elif kind == Kind.RELEASE:
            allocator.empty_cache()
        elif kind != Kind.RETIRE:
            allocator.free(held.pop(number))
        if event == points[place][0]:
            result.timeline.append(Point(event, points[place][1], allocator.reserved))
            place += 1
    result.calls = asdict(allocator.calls)
    return result


def _offline(trace: Trace, name: str, limit: int | None) -> Result:
    found = peak(trace)
    if name == "offline-bound":
        result = Result(name, found.allocated, offline.pages(trace))
    else:
        placement = offline.contiguous(trace)
        result = Result(name, found.allocated, placement.reserved)
        result.ranges = _placed(trace, placement, found.event)
    result.timeline = [
        Point(event, allocated, result.peak_reserved) for event, allocated in _points(trace)
    ]
    if limit is not None and result.peak_reserved > limit:
        result.failed = next(
            (point.event for point in result.timeline if point.allocated > limit), found.event
        )
        result.reason = f"needs {result.peak_reserved} bytes, the limit is {limit}"
    return result


def _placed(trace: Trace, placement: offline.Placement, event: int) -> list[Range]:
    live = [number for number in live_after(trace, event) if number in placement.offsets]
    live.sort(key=placement.offsets.__getitem__)
    found, end = [Range(0, 0, placement.small, -1)], placement.small
    for number in live:
        offset, size = placement.offsets[number], rounded(trace.sizes[number])
        if offset > end:
            found.append(Range(0, end, offset - end, None))
        found.append(Range(0, offset, size, number))
        end = offset + size
    if end < placement.reserved:
        found.append(Range(0, end, placement.reserved - end, None))
    return found


def write_json(results: Sequence[Result], trace: Trace, path: Path) -> None:
    """Write the numbers of a replay, with where the trace comes from."""
    rows = []
    for result in results:
        row = asdict(result)
        del row["ranges"]
        row["timeline"] = [list(point.values()) for point in row["timeline"]]
        row |= {"fragmentation": result.fragmentation, "driver_calls": result.driver_calls}
        rows.append(row)
    found = {"trace": asdict(trace.about), "events": len(trace), "results": rows}
    path.write_text(json.dumps(found, indent=1) + "\n")
