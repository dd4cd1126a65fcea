"""From torch's own history of allocations to a trace.

`torch.cuda.memory._snapshot()` gives what its allocator did, in order, and what it holds. Sizes in
it are those that were asked for, before the allocator's rounding. A use on another stream is not in
it; it shows where a block is given back some time before it can be used again.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import trace as traces
from .trace import About, Kind, Queue, Trace, TraceError

_MOST = 1 << 50
_MADE = ("segment_alloc", "segment_map")
_UNMADE = ("segment_free", "segment_unmap")
_FREED = ("free_requested", "free_completed", "free")


def load(path: str | os.PathLike[str], device: int | None = None) -> Trace:
    """Read a pickle that `torch.cuda.memory._dump_snapshot` wrote. None of its code runs.

    device: the number of the device whose trace is wanted, where the file has several.

    Raises:
        TraceError: the file is no such pickle, or its history is off.
    """
    data = Path(path).read_bytes()
    try:
        _forbid_objects(data)
        found = _Plain(io.BytesIO(data)).load()
    except Exception as error:  # damaged pickles raise whatever comes first
        raise TraceError(
            f"{path}: expected a trace that oxytorch.memory.record wrote, or a pickle of "
            f"torch.cuda.memory._snapshot(): {type(error).__name__}: {error}"
        ) from error
    try:
        return _of_device(found, device)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    except Exception as error:  # what is missing or of another type shows where it is used
        raise TraceError(
            f"{path}: the pickle is no snapshot of torch's: {type(error).__name__}: {error}"
        ) from error


class _Plain(pickle.Unpickler):
    """Containers, texts and numbers alone."""

    def find_class(self, module: str, name: str) -> Any:
        raise TraceError(f"the pickle asks for {module}.{name}; snapshots hold plain values alone")


_PLAIN = frozenset(
    [
        "PROTO",
        "FRAME",
        "STOP",
        "MARK",
        "POP",
        "POP_MARK",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "BININT",
        "BININT1",
        "BININT2",
        "INT",
        "LONG",
        "LONG1",
        "LONG4",
        "BINFLOAT",
        "FLOAT",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
        "UNICODE",
        "EMPTY_LIST",
        "APPEND",
        "APPENDS",
        "LIST",
        "EMPTY_DICT",
        "SETITEM",
        "SETITEMS",
        "DICT",
        "EMPTY_TUPLE",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "MEMOIZE",
        "BINPUT",
        "LONG_BINPUT",
        "PUT",
        "BINGET",
        "LONG_BINGET",
        "GET",
        "BINSTRING",
        "SHORT_BINSTRING",
        "STRING",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
        "DUP",
    ]
)


def _forbid_objects(data: bytes) -> None:
    """Raise where a pickle does more than make plain values, or would take memory for nothing."""
    puts = 0
    for opcode, argument, place in pickletools.genops(data):
        if opcode.name not in _PLAIN:
            raise TraceError(
                f"the pickle has {opcode.name} at byte {place}; snapshots hold plain values alone"
            )
        if opcode.name in ("BINPUT", "LONG_BINPUT", "PUT"):
            puts += 1
            if argument is None or argument > 2 * puts + 256:
                raise TraceError(f"the pickle counts on {argument} values at byte {place}")


def _of_device(found: Any, device: int | None) -> Trace:
    if not isinstance(found, dict) or not isinstance(found.get("device_traces"), list | tuple):
        raise TraceError("the pickle has no device_traces: expected one of torch's snapshots")
    histories = found["device_traces"]
    segments = found.get("segments", [])
    if not isinstance(segments, list | tuple) or not all(isinstance(s, Mapping) for s in segments):
        raise TraceError("the pickle has no list of segments: expected one of torch's snapshots")
    used = [index for index, history in enumerate(histories) if history]
    if device is None:
        if len(used) > 1:
            raise TraceError(f"the snapshot is of devices {used}: say which one (--device)")
        device = used[0] if used else 0
    if not 0 <= device < max(1, len(histories)):
        raise TraceError(f"the snapshot is of {len(histories)} devices, got device {device}")
    if device not in used:
        raise TraceError(
            f"the snapshot has no history of device {device}: call "
            "torch.cuda.memory._record_memory_history() before the program"
        )
    own = [segment for segment in segments if segment.get("device", device) == device]
    about = About(**described(found.get("allocator_settings", {})))
    trace = from_history(histories[device], own, about)
    if not trace.sizes:
        raise TraceError("the snapshot's history has no allocation")
    return trace


def described(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `About` that torch's settings tell."""
    text = settings.get("PYTORCH_ALLOC_CONF") or settings.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return {"settings": str(text), "is_expandable": bool(settings.get("expandable_segments"))}


def from_history(
    history: Sequence[Mapping[str, Any]],
    segments: Iterable[Mapping[str, Any]],
    about: About,
    marks: Sequence[tuple[int, str]] = (),
) -> Trace:
    """The trace of one device.

    history: what the allocator did.
    segments: what it held afterwards. Memory that is given back without having been asked for, or
        that is held without it, was there from the beginning.
    marks: texts with the time of each, in us of the history's clock.
    """
    return _Reader(history, segments, about, marks).read()


class _Reader:
    def __init__(
        self,
        history: Sequence[Mapping[str, Any]],
        segments: Iterable[Mapping[str, Any]],
        about: About,
        marks: Sequence[tuple[int, str]],
    ) -> None:
        self.history, self.segments = history, [*segments]
        _check_history(self.history)
        _check_segments(self.segments)
        self.trace = Trace(about=about)
        self.marks = sorted(marks)
        self.live: dict[int, int] = {}
        self.held = _Ranges()
        self.retired: dict[int, int] = {}
        self.queues: dict[Queue, int] = {}
        self.sites: dict[str, int] = {}
        self.start = self.now = self._time(history[0]) if history else 0
        self.pools = _Pools(self.segments)

    def read(self) -> Trace:
        self._initial()
        for index, entry in enumerate(self.history):
            self._advance(self._time(entry))
            action, address = entry["action"], entry.get("addr", 0)
            if action == "alloc":
                self._alloc(entry)
            elif action in _FREED:
                self._free(action, address, index)
            elif action == "oom":
                free = entry.get("device_free", 0)
                text = f"out of memory: {entry['size']} bytes, {free} free on the device"
                self.trace.marks.append((len(self.trace), text))
            elif action in _UNMADE and self._is_asked_for(index):
                self.trace.event(Kind.RELEASE, -1, self.now - self.start)
        self._advance(None)
        self.trace.queue_list = [*self.queues]
        self.trace.sites = [*self.sites]
        try:
            self.trace.check()
        except TraceError as error:
            raise TraceError(f"torch's history contradicts itself: {error}") from error
        return self.trace

    def _time(self, entry: Mapping[str, Any]) -> int:
        return int(entry.get("time_us", 0))

    def _advance(self, time: int | None) -> None:
        """Go on to a time; the clocks of threads may differ by a little. None: to the end."""
        while self.marks and (time is None or self.marks[0][0] <= time):
            self.trace.marks.append((len(self.trace), self.marks.pop(0)[1]))
        self.now = max(self.now, time or 0)

    def _alloc(self, entry: Mapping[str, Any]) -> None:
        address, size = entry["addr"], entry["size"]
        other = self.held.add(address, address + size)
        if other is not None:
            raise TraceError(
                f"{address:#x} is handed out twice: {size} bytes there, while those from "
                f"{other:#x} on are held; torch's history lacks events"
            )
        pool = entry.get("pool_id") or self.pools.of(address)
        queue = Queue(int(entry.get("stream", 0)), (int(pool[0]), int(pool[1])))
        site = _site(entry.get("frames") or ())
        place = self.sites.setdefault(site, len(self.sites)) if site else -1
        place_of = self.queues.setdefault(queue, len(self.queues))
        self.live[address] = self.trace.alloc(size, place_of, self.now - self.start, place)

    def _free(self, action: str, address: int, index: int) -> None:
        time = self.now - self.start
        if action == "free_completed":
            # After free_requested, unless that was left out of the history.
            number = self.retired.pop(address, None)
            if number is not None:
                self.trace.event(Kind.REUSE, number, time)
            elif address in self.live:
                self.trace.event(Kind.FREE, self._give_back(address), time)
            return
        if address not in self.live:
            return
        number = self._give_back(address)
        following = self.history[index + 1] if index + 1 < len(self.history) else {}
        is_done = following.get("action") == "free_completed" and following.get("addr") == address
        if action == "free" or is_done:
            self.trace.event(Kind.FREE, number, time)
        else:
            self.trace.event(Kind.RETIRE, number, time)
            self.retired[address] = number

    def _give_back(self, address: int) -> int:
        """The number of the allocation that was there."""
        self.held.remove(address)
        return self.live.pop(address)

    def _is_asked_for(self, index: int) -> bool:
        """Whether memory is given back because the program said so, once for each time.

        The allocator does it too, before it asks for more, where memory ran out.
        """
        if index and self.history[index - 1]["action"] in _UNMADE:
            return False
        if not self.trace.about.retries:
            return "garbage_collection_threshold" not in self.trace.about.settings
        after = index
        while after < len(self.history) and self.history[after]["action"] in _UNMADE:
            after += 1
        return after == len(self.history) or self.history[after]["action"] not in (*_MADE, "oom")

    def _initial(self) -> None:
        """What was held when the history began: it is freed, or still held, without an alloc."""
        made: set[int] = set()
        held: dict[int, Mapping[str, Any]] = {}
        for entry in self.history:
            address = entry.get("addr")
            if entry["action"] == "alloc":
                made.add(entry["addr"])
            elif entry["action"] in _FREED and address not in made and address not in held:
                held[entry["addr"]] = entry
        for segment in self.segments:
            address = segment["address"]
            for block in segment["blocks"]:
                place = block.get("address", address)
                if block["state"] == "active_allocated" and place not in made:
                    size = block.get("requested_size", block["size"])
                    held.setdefault(
                        place,
                        {
                            "size": size,
                            "stream": segment.get("stream", 0),
                            "frames": block.get("frames", ()),
                        },
                    )
                address += block["size"]
        for address in sorted(held):
            self._alloc({**held[address], "addr": address})
        self.trace.about.initial_bytes = sum(map(traces.rounded, self.trace.sizes))


class _Ranges:
    """Ranges of addresses that do not overlap."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> int | None:
        """Adds a range. Returns the start of one that it overlaps, and then it is not added."""
        # No range is empty: each has an address of its own.
        end = max(end, begin + 1)
        place = bisect_right(self._begins, begin)
        if place and self._ends[place - 1] > begin:
            return self._begins[place - 1]
        if place < len(self._begins) and self._begins[place] < end:
            return self._begins[place]
        self._begins.insert(place, begin)
        self._ends.insert(place, end)
        return None

    def remove(self, begin: int) -> None:
        """Removes the range that begins there."""
        place = bisect_right(self._begins, begin) - 1
        del self._begins[place], self._ends[place]


def _number(holder: Mapping[str, Any], name: str, what: str, most: int) -> int:
    """A value that has to be an integer from 0 on."""
    if name not in holder:
        raise TraceError(f"{what} has no {name}")
    value = holder[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < most:
        raise TraceError(f"{what} has the {_WORDS.get(name, name)} {value!r}")
    return value


_WORDS = {"addr": "address", "time_us": "time", "total_size": "size"}
_MOST_ADDRESS = 1 << 64
_KNOWN = frozenset(["alloc", "oom", "snapshot", *_MADE, *_UNMADE, *_FREED])


def _check_history(history: Sequence[Mapping[str, Any]]) -> None:
    """Raise where an event is none of torch's."""
    for index, entry in enumerate(history):
        what = f"event {index} of the history"
        if not isinstance(entry, Mapping) or not isinstance(entry.get("action"), str):
            raise TraceError(f"{what} has no action, such as 'alloc'")
        if entry["action"] not in _KNOWN:
            continue  # of a later torch
        _number({"time_us": 0, **entry}, "time_us", what, 1 << 60)
        if entry["action"] in ("alloc", *_FREED):
            _number(entry, "addr", what, _MOST_ADDRESS)
        if entry["action"] in ("alloc", "oom", *_FREED):
            _number(entry, "size", what, _MOST)


def _check_segments(segments: Sequence[Mapping[str, Any]]) -> None:
    """Raise where memory overlaps, or blocks lie outside their segments."""
    held = _Ranges()
    for index, segment in enumerate(segments):
        what = f"segment {index}"
        if not isinstance(segment, Mapping) or not isinstance(segment.get("blocks"), list | tuple):
            raise TraceError(f"{what} has no list of blocks")
        begin = _number(segment, "address", what, _MOST_ADDRESS)
        end = begin + _number(segment, "total_size", what, _MOST)
        other = held.add(begin, end)
        if other is not None:
            raise TraceError(f"{what}, from {begin:#x} to {end:#x}, overlaps the one at {other:#x}")
        at = begin
        for number, block in enumerate(segment["blocks"]):
            at = _check_block(block, f"block {number} of {what}", begin, end, at)


def _check_block(block: Mapping[str, Any], what: str, begin: int, end: int, at: int) -> int:
    """Raise where a block is not behind those before it, in its segment; returns its end."""
    if not isinstance(block, Mapping) or not isinstance(block.get("state"), str):
        raise TraceError(f"{what} has no state, such as 'inactive'")
    size = _number(block, "size", what, _MOST)
    asked = _number({"requested_size": 0, **block}, "requested_size", what, _MOST)
    # That of a free block is of whoever had it before.
    if asked > size and block["state"].startswith("active"):
        raise TraceError(f"{what} has {size} bytes for a request of {asked}")
    place = _number({"address": at, **block}, "address", what, _MOST_ADDRESS)
    if not begin <= place <= end - size:
        raise TraceError(
            f"{what}, from {place:#x} to {place + size:#x}, lies outside its segment, from "
            f"{begin:#x} to {end:#x}"
        )
    if place < at:
        raise TraceError(f"{what}, at {place:#x}, overlaps the one before it, up to {at:#x}")
    return place + size


class _Pools:
    """The pools of addresses, for versions of torch whose history does not tell them."""

    def __init__(self, segments: Iterable[Mapping[str, Any]]) -> None:
        self._found = sorted(
            (each["address"], each["address"] + each["total_size"], each["segment_pool_id"])
            for each in segments
            if "segment_pool_id" in each
        )
        self._starts = [start for start, _, _ in self._found]

    def of(self, address: int) -> tuple[int, int]:
        index = bisect_right(self._starts, address) - 1
        if index >= 0 and address < self._found[index][1]:
            first, second = self._found[index][2]
            return first, second
        return 0, 0


def _site(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost line of the program: outside torch where there is one."""
    best = ""
    for frame in frames:
        name, file = str(frame.get("name", "")), str(frame.get("filename", ""))
        if not file.endswith(".py"):
            continue
        text = f"{Path(file).name}:{frame.get('line', 0)} {name}"
        if "torch" not in Path(file).parts:
            return text
        best = best or text
    return best
