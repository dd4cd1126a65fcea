"""torch's history of allocations as traces, and its pickles without running what is in them."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
from pathlib import Path

import made_traces
import pytest

from oxytorch.memory import snapshot
from oxytorch.memory._core import Allocator, Fake
from oxytorch.memory.stock import Settings
from oxytorch.memory.trace import About, Kind, Queue, Trace, TraceError, peak


def entry(action: str, address: int, size: int = 512, **more):
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 9, **more}


def freed(address: int, size: int = 512):
    return [entry("free_requested", address, size), entry("free_completed", address, size)]


def read(*entries, segments=(), **about) -> Trace:
    return snapshot.from_history(entries, segments, About(**about))


def events(trace: Trace) -> list[tuple[str, int]]:
    return [
        (Kind(kind).name, number) for kind, number in zip(trace.kinds, trace.which, strict=True)
    ]


@pytest.mark.parametrize("make", [made_traces.training, made_traces.serving])
@pytest.mark.parametrize("is_expandable", [False, True])
def test_history_gives_the_trace_that_made_it(make, is_expandable: bool, tmp_path: Path) -> None:
    trace = make()
    found, _ = made_traces.history(trace, Settings(is_expandable=is_expandable))
    path = tmp_path / "torch.pickle"
    path.write_bytes(pickle.dumps(found))
    read = snapshot.load(path)
    assert events(read) == events(trace)
    assert read.sizes == trace.sizes
    assert [read.queue_list[each] for each in read.queues] == [
        trace.queue_list[each] for each in trace.queues
    ]
    first = trace.times[0]
    assert [*read.times] == [time - first for time in trace.times]


def test_block_that_waits_for_a_stream_is_retired_until_it_is_done() -> None:
    trace = read(
        entry("alloc", 1024),
        entry("free_requested", 1024),
        entry("alloc", 2048),
        entry("free_completed", 1024),
        *freed(2048),
    )
    assert events(trace) == [
        ("ALLOC", 0),
        ("RETIRE", 0),
        ("ALLOC", 1),
        ("REUSE", 0),
        ("FREE", 1),
    ]


def test_memory_held_from_before_is_allocated_at_the_beginning() -> None:
    segments = [
        {
            "address": 1 << 20,
            "total_size": 1 << 20,
            "stream": 5,
            "blocks": [
                {"size": 512, "requested_size": 100, "state": "active_allocated"},
                {"size": 512, "state": "inactive"},
                {"size": 1024, "requested_size": 1000, "state": "active_allocated"},
            ],
        }
    ]
    trace = read(*freed(4096, 700), entry("alloc", 1 << 20 | 1024, 1000), segments=segments)
    assert events(trace) == [("ALLOC", 0), ("ALLOC", 1), ("FREE", 0), ("ALLOC", 2)]
    assert [*trace.sizes] == [700, 100, 1000]
    assert trace.queue_list == [Queue(0), Queue(5)]
    assert trace.about.initial_bytes == 1024 + 512


def test_emptied_cache_is_one_release_and_a_retry_is_none() -> None:
    given_back = [entry("segment_free", 1 << 21), entry("segment_free", 1 << 22)]
    again = [entry("segment_alloc", 1 << 21), entry("alloc", 1 << 21)]
    assert events(read(entry("alloc", 512), *given_back, *again)) == [
        ("ALLOC", 0),
        ("RELEASE", -1),
        ("ALLOC", 1),
    ]
    assert events(read(entry("alloc", 512), *given_back, *again, retries=1)) == [
        ("ALLOC", 0),
        ("ALLOC", 1),
    ]
    assert ("RELEASE", -1) in events(read(entry("alloc", 512), *given_back, retries=1))


def test_failed_allocation_becomes_a_mark() -> None:
    trace = read(entry("alloc", 512), {"action": "oom", "size": 7 << 30, "device_free": 1})
    assert trace.marks == [(1, "out of memory: 7516192768 bytes, 1 free on the device")]


def test_pools_of_graphs_are_queues_of_their_own() -> None:
    segments = [{"address": 4096, "total_size": 4096, "segment_pool_id": (0, 3), "blocks": []}]
    trace = read(
        entry("alloc", 4096), entry("alloc", 512, pool_id=(0, 1)), entry("alloc", 9000),
        segments=segments,
    )  # fmt: skip
    assert trace.queue_list == [Queue(0, (0, 3)), Queue(0, (0, 1)), Queue(0)]


def test_marks_lie_between_the_events_of_their_time() -> None:
    history = [entry("alloc", 512 * each, time_us=100 * each) for each in range(1, 5)]
    trace = snapshot.from_history(history, [], About(), [(250, "b"), (50, "a"), (900, "c")])
    assert trace.marks == [(0, "a"), (2, "b"), (4, "c")]


def test_site_is_the_innermost_line_outside_torch() -> None:
    frames = [
        {"filename": "/x/site-packages/torch/nn/functional.py", "line": 7, "name": "linear"},
        {"filename": "/home/me/train.py", "line": 30, "name": "forward"},
        {"filename": "/home/me/main.py", "line": 2, "name": "<module>"},
    ]
    trace = read(
        entry("alloc", 512, frames=frames),
        entry("alloc", 1024, frames=frames[:1]),
        entry("alloc", 2048, frames=[{"filename": "??", "line": 0, "name": "at::empty"}]),
    )
    assert trace.sites == ["train.py:30 forward", "functional.py:7 linear"]
    assert [*trace.places] == [0, 1, -1]


def test_address_handed_out_twice_says_that_events_are_missing() -> None:
    with pytest.raises(TraceError, match="0x200 is handed out twice"):
        read(entry("alloc", 512), entry("alloc", 512))


def write(path: Path, value) -> Path:
    path.write_bytes(value if isinstance(value, bytes) else pickle.dumps(value))
    return path


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 2], "has no device_traces"),
        ({"device_traces": 3}, "has no device_traces"),
        ({"device_traces": [[], []]}, "no history of device 0: call torch.cuda.memory._record"),
        ({"device_traces": []}, "no history of device 0: call torch.cuda.memory._record"),
        ({"device_traces": [[{}]]}, "event 0 of the history has no action"),
        ({"device_traces": [["alloc"]]}, "event 0 of the history has no action"),
        ({"device_traces": [[{"action": "alloc", "size": 1}]]}, "event 0 .* has no addr"),
        ({"device_traces": [[{"action": "free", "addr": 1}]]}, "event 0 .* has no size"),
        ({"device_traces": [[entry("alloc", "a")]]}, "has the address 'a'"),
        ({"device_traces": [[entry("alloc", True)]]}, "has the address True"),
        ({"device_traces": [[entry("alloc", -512)]]}, "has the address -512"),
        ({"device_traces": [[entry("allocate", 512)]]}, "history has no allocation"),
        (
            {"device_traces": [[entry("alloc", 512, 2048), entry("alloc", 1024)]]},
            "0x400 is handed out twice: 512 bytes there, while those from 0x200 on are held",
        ),
        (
            {"device_traces": [[entry("alloc", 1024), entry("alloc", 512, 2048)]]},
            "0x200 is handed out twice",
        ),
        ({"device_traces": [[entry("alloc", 1)]], "segments": 5}, "no list of segments"),
        ({"device_traces": [[entry("alloc", 1)]], "segments": ["x"]}, "no list of segments"),
        ({"device_traces": [[entry("alloc", 1, -4)]]}, "size -4"),
        ({"device_traces": [[entry("alloc", 1, 1 << 60)]]}, "size 1152921504606846976"),
        ({"device_traces": [[entry("alloc", 1, time_us="x")]]}, "time 'x'"),
        ({"device_traces": [[entry("alloc", 1)], [entry("alloc", 2)]]}, r"devices \[0, 1\]: say"),
    ],
)
def test_snapshot_that_is_none_is_a_clear_error(tmp_path: Path, value, text: str) -> None:
    with pytest.raises(TraceError, match=text) as raised:
        snapshot.load(write(tmp_path / "torch.pickle", value))
    assert "torch.pickle: " in str(raised.value)


def block(size: int, state: str = "active_allocated", **more):
    return {"size": size, "state": state, **more}


@pytest.mark.parametrize(
    ("segments", "text"),
    [
        ([(0, 4096, None)], "segment 0 has no list of blocks"),
        ([("0", 4096, [])], "segment 0 has the address '0'"),
        ([(0, -1, [])], "segment 0 has the size -1"),
        ([(0, 4096, []), (2048, 4096, [])], "segment 1, from 0x800 to 0x1800, overlaps .* 0x0"),
        ([(0, 4096, [block(2048), block(4096)])], "block 1 .*, from 0x800 to 0x1800, lies outside"),
        ([(4096, 4096, [block(512, address=512)])], "block 0 of segment 0, .* lies outside"),
        ([(0, 4096, [block(1024, address=512), block(512, address=1024)])], "overlaps the one bef"),
        ([(0, 4096, [block(512, requested_size=513)])], "has 512 bytes for a request of 513"),
        ([(0, 4096, [block("x")])], "block 0 of segment 0 has the size 'x'"),
        ([(0, 4096, [{"size": 512}])], "block 0 of segment 0 has no state"),
        ([(0, 4096, [{"state": "inactive"}])], "block 0 of segment 0 has no size"),
        ([(0, 4096, [7])], "block 0 of segment 0 has no state"),
    ],
)
def test_segments_that_cannot_be_are_a_clear_error(tmp_path: Path, segments, text: str) -> None:
    value = {
        "device_traces": [[entry("alloc", 1 << 30)]],
        "segments": [
            {"address": address, "total_size": size, "blocks": blocks}
            for address, size, blocks in segments
        ],
    }
    with pytest.raises(TraceError, match=f"torch.pickle: .*{text}"):
        snapshot.load(write(tmp_path / "torch.pickle", value))


def test_free_block_may_have_the_request_of_before() -> None:
    free = block(512, "inactive", requested_size=9999)
    segments = [{"address": 0, "total_size": 512, "blocks": [free]}]
    assert len(read(entry("alloc", 4096), segments=segments)) == 1


def test_snapshots_of_ours_are_plausible() -> None:
    fake = Fake(256 << 20)
    allocator = Allocator(fake.table, "mapped")
    blocks = [allocator.allocate(0, size << 20) for size in (3, 5, 20, 1)]
    allocator.free(blocks[1])
    trace = read(segments=allocator.snapshot(0))
    assert sorted(trace.sizes) == [1 << 20, 3 << 20, 20 << 20]
    allocator.close()
    fake.end()


def test_device_of_a_snapshot_is_chosen(tmp_path: Path) -> None:
    value = {"device_traces": [[entry("alloc", 1, 600)], [entry("alloc", 2, 700)]], "segments": []}
    path = write(tmp_path / "torch.pickle", value)
    assert [*snapshot.load(path, 1).sizes] == [700]
    for device in (2, -1):
        with pytest.raises(TraceError, match=f"of 2 devices, got device {device}"):
            snapshot.load(path, device)


class Runs:
    def __reduce__(self):
        return os.mkdir, (str(Runs.place),)


def test_no_code_of_a_pickle_runs(tmp_path: Path) -> None:
    Runs.place = tmp_path / "ran"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path = write(tmp_path / "bad.pickle", pickle.dumps({"x": Runs()}, protocol))
        with pytest.raises(TraceError, match="snapshots hold plain values alone"):
            snapshot.load(path)
    assert not Runs.place.exists()


def test_pickle_that_would_take_all_memory_is_refused(tmp_path: Path) -> None:
    bomb = b"\x80\x04K\x01r" + struct.pack("<I", 0xFFFFFFF0) + b"."
    with pytest.raises(TraceError, match="counts on 4294967280 values"):
        snapshot.load(write(tmp_path / "bomb.pickle", bomb))


def test_damaged_pickles_never_crash(tmp_path: Path) -> None:
    found, _ = made_traces.history(made_traces.training(steps=1, layers=2))
    data, choose = pickle.dumps(found), random.Random(3)
    path = tmp_path / "torch.pickle"
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(choose.randint(1, 5)):
            damaged[choose.randrange(len(damaged))] = choose.randrange(256)
        if choose.random() < 0.3:
            del damaged[choose.randrange(len(damaged)) :]
        path.write_bytes(damaged)
        try:
            peak(snapshot.load(path))
        except TraceError as error:
            assert str(error).startswith(str(path))


def test_old_protocols_of_torchs_own_unpickler_are_read(tmp_path: Path) -> None:
    found, _ = made_traces.history(made_traces.training(steps=1, layers=2))
    lengths = set()
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        stream = io.BytesIO()
        pickle.Pickler(stream, protocol).dump(found)
        lengths.add(len(snapshot.load(write(tmp_path / "torch.pickle", stream.getvalue()))))
    assert len(lengths) == 1
