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
    used = [index for index, history in enumerate(histories) if history]
    if device is None:
        if len(used) > 1:
            raise TraceError(f"the snapshot is of devices {used}: say which one (--device)")
        if not used:
            raise TraceError(
                "the snapshot has no history: call torch.cuda.memory._record_memory_history() "
                "before the program"
            )
        device = used[0]
    elif not 0 <= device < len(histories):
        raise TraceError(f"the snapshot is of {len(histories)} devices, got device {device}")
    own = [segment for segment in segments if segment.get("device", device) == device]
    about = About(**described(found.get("allocator_settings", {})))
    return from_history(histories[device], own, about)


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
        self.trace = Trace(about=about)
        self.marks = sorted(marks)
        self.live: dict[int, int] = {}
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
        time = entry.get("time_us", 0)
        if not isinstance(time, int) or not 0 <= time < 1 << 60:
            raise TraceError(f"an event has the time {time!r}")
        return time

    def _advance(self, time: int | None) -> None:
        """Go on to a time; the clocks of threads may differ by a little. None: to the end."""
        while self.marks and (time is None or self.marks[0][0] <= time):
            self.trace.marks.append((len(self.trace), self.marks.pop(0)[1]))
        self.now = max(self.now, time or 0)

    def _alloc(self, entry: Mapping[str, Any]) -> None:
        address, size = entry["addr"], entry["size"]
        if not isinstance(size, int) or not 0 <= size < _MOST:
            raise TraceError(f"an allocation has the size {size!r}")
        if address in self.live:
            raise TraceError(f"{address:#x} is handed out twice: torch's history lacks events")
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
                self.trace.event(Kind.FREE, self.live.pop(address), time)
            return
        number = self.live.pop(address, None)
        if number is None:
            return
        following = self.history[index + 1] if index + 1 < len(self.history) else {}
        is_done = following.get("action") == "free_completed" and following.get("addr") == address
        if action == "free" or is_done:
            self.trace.event(Kind.FREE, number, time)
        else:
            self.trace.event(Kind.RETIRE, number, time)
            self.retired[address] = number

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
