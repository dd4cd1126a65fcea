"""Trace files: small, whole or a clear error, whatever somebody does to them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import zlib
from pathlib import Path

import made_traces
import pytest

from oxytorch.memory import record
from oxytorch.memory import trace as traces
from oxytorch.memory.trace import About, Kind, Queue, Trace, TraceError

DATA = Path(__file__).parent / "data"
HEAD = 48


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.trace"
    trace = made_traces.serving(requests=6)
    trace.about = About(program="serve.py", total_memory=1 << 35, settings="a:b", lost=3)
    trace.sites, trace.places[0] = ["serve.py:3 main"], 0
    traces.save(trace, path)
    return path


def sealed(content: bytes) -> bytes:
    return struct.pack("<8sII32s", b"oxytrace", 1, 0, hashlib.sha256(content).digest()) + content


def described(data: bytes) -> tuple[dict, bytes]:
    (length,) = struct.unpack_from("<I", data, HEAD)
    return json.loads(zlib.decompress(data[HEAD + 4 : HEAD + 4 + length])), data[
        HEAD + 4 + length :
    ]


def forged(data: bytes, change) -> bytes:
    description, columns = described(data)
    changed = change(description)
    head = zlib.compress(json.dumps(description if changed is None else changed).encode())
    return sealed(struct.pack("<I", len(head)) + head + columns)


def test_trace_comes_back_as_it_was(path: Path) -> None:
    trace = traces.load(path)
    again = path.with_name("again.trace")
    traces.save(trace, again)
    assert traces.load(again) == trace
    assert again.read_bytes() == path.read_bytes()
    assert trace.about.program == "serve.py"
    assert trace.sites == ["serve.py:3 main"]
    assert trace.queue_list == [Queue(), Queue(7)]
    assert set(trace.kinds) == {Kind.ALLOC, Kind.FREE, Kind.RETIRE, Kind.REUSE}


def test_empty_trace_comes_back(tmp_path: Path) -> None:
    traces.save(Trace(), tmp_path / "none.trace")
    assert len(traces.load(tmp_path / "none.trace")) == 0


def test_trace_takes_few_bytes_an_event(path: Path) -> None:
    assert path.stat().st_size < 4 * len(traces.load(path))


def test_failed_save_leaves_the_old_file_and_no_other(path: Path) -> None:
    before, broken = path.read_bytes(), Trace()
    broken.event(Kind.FREE, 0)
    with pytest.raises(TraceError, match="event 0 is FREE of allocation 0, which is not there"):
        traces.save(broken, path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_each_changed_byte_is_noticed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in {*range(HEAD), *range(HEAD, len(data), 97)}:
        data[place] ^= 0x41
        path.write_bytes(data)
        with pytest.raises(TraceError, match=r"run\.trace: "):
            traces.load(path)
        data[place] ^= 0x41


@pytest.mark.parametrize("wrong", [99, 0, None, ["run.trace"], 1.5])
def test_what_is_no_name_of_a_file_is_not_opened(wrong) -> None:
    with pytest.raises(TypeError, match="load_trace: path: expected the name of a file, got "):
        traces.load_trace(wrong)
    with pytest.raises(TypeError, match="record: path: expected the name of a file to write, got "):
        record(wrong).__enter__()


def test_device_is_a_number_and_events_too(path: Path) -> None:
    with pytest.raises(TypeError, match="load_trace: device: expected the number of a device"):
        traces.load_trace(path, "cuda:0")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="record: max_events: expected an integer, got '9'"):
        record(path, max_events="9").__enter__()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="record: max_events: expected at least 1, got 0"):
        record(path, max_events=0).__enter__()


def test_each_cut_is_noticed(path: Path) -> None:
    data = path.read_bytes()
    for length in {*range(60), *range(60, len(data), 211), len(data) - 1}:
        path.write_bytes(data[:length])
        with pytest.raises(TraceError):
            traces.load(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"oxytrac", os.urandom(4096)])
def test_foreign_file_is_named_as_such(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"foreign: expected a trace that oxytorch\.memory"):
        traces.load(path)


def test_later_version_asks_for_an_upgrade(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8] = 2
    path.write_bytes(data)
    with pytest.raises(TraceError, match="version 2, this oxytorch reads 1: upgrade"):
        traces.load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: [],
        lambda found: 7,
        lambda found: found.update(events=1 << 40),
        lambda found: found.update(events=-1),
        lambda found: found.update(events=1.5),
        lambda found: found.update(events="9"),
        lambda found: found.update(allocations=found["events"] + 1),
        lambda found: found.update(about=None),
        lambda found: found["about"].update(lost=-1),
        lambda found: found["about"].update(lost="3"),
        lambda found: found["about"].update(program=5),
        lambda found: found["about"].update(total_memory=1 << 70),
        lambda found: found.pop("queues"),
        lambda found: found.update(queues=[]),
        lambda found: found.update(queues=[[0]]),
        lambda found: found.update(marks=[[1 << 40, "late"]]),
        lambda found: found.update(marks=[["x", "late"]]),
        lambda found: found.update(marks=3),
        lambda found: found.update(sites=[]),
        lambda found: found["columns"].update(sizes=-5),
        lambda found: found["columns"].update(sizes=1 << 60),
        lambda found: found["columns"].pop("kinds"),
        lambda found: found.update(columns=[]),
    ],
)
def test_forged_description_is_a_clear_error(path: Path, change) -> None:
    path.write_bytes(forged(path.read_bytes(), change))
    with pytest.raises(TraceError, match=r"run\.trace: "):
        traces.load(path)


def test_random_forgeries_with_a_right_checksum_never_crash(path: Path) -> None:
    data, choose = path.read_bytes(), random.Random(5)
    for _ in range(300):
        content = bytearray(data[HEAD:])
        for _ in range(choose.randint(1, 4)):
            content[choose.randrange(len(content))] = choose.randrange(256)
        if choose.random() < 0.3:
            del content[choose.randrange(len(content)) :]
        path.write_bytes(sealed(bytes(content)))
        try:
            traces.load(path).check()
        except TraceError as error:
            assert str(error).startswith(str(path))


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([(Kind.ALLOC, 0), (Kind.FREE, 0), (Kind.FREE, 0)], "event 2 is FREE"),
        ([(Kind.ALLOC, 0), (Kind.REUSE, 0)], "event 1 is REUSE"),
        ([(Kind.ALLOC, 0), (Kind.RETIRE, 0), (Kind.FREE, 0)], "event 2 is FREE"),
        ([(Kind.ALLOC, 0), (Kind.FREE, 5)], "event 1 is FREE of allocation 5"),
        ([(Kind.ALLOC, 1)], "event 0 makes allocation 1, expected 0"),
        ([(9, 0)], "event 0 has kind 9"),
    ],
)
def test_events_that_contradict_each_other_are_named(events, text: str) -> None:
    trace = Trace()
    for kind, number in events:
        if kind == Kind.ALLOC:
            trace.alloc(512)
            trace.which[-1] = number
        else:
            trace.event(kind, number)
    with pytest.raises(TraceError, match=text):
        trace.check()


def test_peak_counts_sizes_rounded_up_and_streams_that_still_use_blocks() -> None:
    trace = Trace()
    first, second = trace.alloc(1), trace.alloc(513)
    trace.event(Kind.RETIRE, first)
    third = trace.alloc(100)
    trace.event(Kind.REUSE, first)
    found = traces.peak(trace)
    assert (found.allocated, found.active, found.event) == (1536, 2048, 1)
    assert traces.live_after(trace, 3) == [second, third]


def test_holders_are_the_lines_that_hold_most_at_the_peak() -> None:
    trace = Trace(sites=["a.py:1 f", "b.py:2 g"])
    gone = trace.alloc(1 << 20, place=0)
    trace.event(Kind.FREE, gone)
    for _ in range(3):
        trace.alloc(1 << 19, place=1)
    trace.alloc(512)
    assert traces.holders(trace) == [
        (3 << 19, 3, "b.py:2 g"),
        (512, 1, "(no Python code, as in backward)"),
    ]


@pytest.mark.parametrize("path", sorted(DATA.glob("*.trace")), ids=lambda path: path.stem)
def test_recorded_traces_are_small_and_name_no_path(path: Path) -> None:
    assert path.stat().st_size < 300_000
    trace = traces.load(path)
    assert trace.about.lost == 0
    assert trace.about.device.startswith("NVIDIA H100")
    assert not any("/" in site for site in trace.sites)
