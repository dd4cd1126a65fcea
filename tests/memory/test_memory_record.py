"""Recording from torch's history; here with a stand-in for its CUDA allocator."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import made_traces
import pytest
import torch

from oxytorch.memory import record
from oxytorch.memory import trace as traces


class Device:
    """A CUDA device on which a trace happens."""

    def __init__(self, monkeypatch, lost: int = 0) -> None:
        self.trace = made_traces.training(steps=2)
        self.snapshot, self.most = made_traces.history(self.trace)
        for each in self.snapshot["device_traces"][0]:
            each["time_us"] += time.time_ns() // 1000 - 1_700_000_000_000_000
        self.snapshot["allocator_settings"] = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
        self.statistics = {"allocation.all.allocated": 5, "reserved_bytes.all.peak": 100}
        self.lost, self.is_enabled, self.settings = lost, False, {}
        self.fraction = 1.0
        properties = SimpleNamespace(name="stand-in", total_memory=1 << 34)
        for name, value in {
            "is_available": lambda: True,
            "init": lambda: None,
            "current_device": lambda: 0,
            "get_allocator_backend": lambda: "native",
            "get_device_properties": lambda index: properties,
            "get_per_process_memory_fraction": lambda index: self.fraction,
            "memory_stats": lambda index: dict(self.statistics),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.enable)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: self.snapshot)
        monkeypatch.setattr(
            torch._C, "_cuda_isHistoryEnabled", lambda: self.is_enabled, raising=False
        )

    def enable(self, enabled, **settings) -> None:
        self.is_enabled = enabled is not None
        self.settings = settings or self.settings

    def run(self) -> None:
        self.statistics["allocation.all.allocated"] += len(self.trace.sizes) + self.lost
        self.statistics["reserved_bytes.all.peak"] = self.most
        self.statistics["num_device_alloc"] = 7


def test_record_writes_what_the_block_allocated(monkeypatch, tmp_path: Path) -> None:
    device = Device(monkeypatch)
    path = tmp_path / "run.trace"
    with record(path) as recording:
        assert device.is_enabled
        recording.mark("first")
        device.run()
    assert not device.is_enabled
    trace = traces.load(path)
    assert trace == recording.trace
    assert trace.sizes == device.trace.sizes
    assert trace.marks[0][1] == "first"
    about = trace.about
    assert (about.device, about.total_memory, about.torch) == (
        "stand-in",
        1 << 34,
        torch.__version__,
    )
    assert about.settings == "max_split_size_mb:64"
    assert (about.peak_reserved, about.device_allocations, about.lost) == (device.most, 7, 0)
    assert device.settings["context"] == "alloc"


def test_limit_of_the_process_is_noted(monkeypatch, tmp_path: Path) -> None:
    device = Device(monkeypatch)
    device.fraction = 0.25
    with record(tmp_path / "run.trace"):
        device.run()
    assert traces.load(tmp_path / "run.trace").about.limit == 1 << 32


def test_trace_is_written_also_where_the_block_raises(monkeypatch, tmp_path: Path) -> None:
    device = Device(monkeypatch)
    with (
        pytest.raises(torch.OutOfMemoryError, match="no more") as ended,
        record(tmp_path / "run.trace", stacks=False),
    ):
        device.run()
        raise torch.OutOfMemoryError("no more")
    lines = str(ended.value).splitlines()
    assert lines[1] == "Most is held by"
    assert "allocations: " in lines[2]
    assert lines[-1].endswith(f"oxytorch memory advise {tmp_path / 'run.trace'}")
    assert len(traces.load(tmp_path / "run.trace")) == len(device.trace)
    assert not device.is_enabled
    assert device.settings["context"] is None


def test_lost_events_are_counted_and_warned_of(monkeypatch, tmp_path: Path) -> None:
    device = Device(monkeypatch, lost=12)
    with (
        pytest.warns(UserWarning, match="lacks the first 12 allocations: there was room for 50"),
        record(tmp_path / "run.trace", max_events=50),
    ):
        device.run()
    assert traces.load(tmp_path / "run.trace").about.lost == 12
    assert device.settings["max_entries"] == 50


def test_peak_of_before_the_recording_is_not_its_own(monkeypatch, tmp_path: Path) -> None:
    device = Device(monkeypatch)
    device.statistics["reserved_bytes.all.peak"] = device.most
    with record(tmp_path / "run.trace"):
        device.run()
    assert traces.load(tmp_path / "run.trace").about.peak_reserved is None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"is_available": lambda: False}, RuntimeError, "needs a CUDA device"),
        ({"get_allocator_backend": lambda: "pluggable"}, RuntimeError, "native allocator, found"),
    ],
)
def test_record_without_torchs_allocator_says_why(
    monkeypatch, tmp_path: Path, change, error, message: str
) -> None:
    Device(monkeypatch)
    for name, value in change.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with pytest.raises(error, match=message), record(tmp_path / "run.trace"):
        pass
    assert not (tmp_path / "run.trace").exists()


def test_record_refuses_what_it_cannot_do(monkeypatch, tmp_path: Path) -> None:
    device = Device(monkeypatch)
    with (
        pytest.raises(FileNotFoundError, match="expected an existing folder"),
        record(tmp_path / "a" / "b"),
    ):
        pass
    with pytest.raises(FileExistsError, match="is no file"), record("/dev/null"):
        pass
    with pytest.raises(IsADirectoryError, match="found a folder"), record(tmp_path):
        pass
    script = tmp_path / "train.py"
    script.write_text("print('mine')\n")
    with (
        pytest.raises(FileExistsError, match=r"train\.py is there and is no trace"),
        record(script),
    ):
        pass
    assert script.read_text() == "print('mine')\n"
    with pytest.raises(ValueError, match="max_events"), record(tmp_path / "a", max_events=0):
        pass
    with pytest.raises(ValueError, match="expected a CUDA device, got cpu"):
        record(tmp_path / "a", device="cpu").__enter__()
    device.is_enabled = True
    with pytest.raises(RuntimeError, match="is being recorded already"), record(tmp_path / "a"):
        pass
