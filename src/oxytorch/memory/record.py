"""Records what a program on a CUDA device asks of torch's allocator."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import snapshot
from . import trace as traces
from .sizes import size
from .torch_allocator import device_of
from .trace import About, Trace

MOST_EVENTS = 1_000_000


class MemoryRecording:
    """What `record` gives.

    trace: the recorded trace, once the block has ended.
    """

    trace: Trace | None = None

    def __init__(self) -> None:
        self._marks: list[tuple[int, str]] = []

    def mark(self, text: str) -> None:
        """Note where a step begins; pictures and tables show it."""
        self._marks.append((time.time_ns() // 1000, text))


@contextlib.contextmanager
def record(
    path: str | os.PathLike[str],
    *,
    device: torch.device | int | str | None = None,
    stacks: bool = True,
    max_events: int = MOST_EVENTS,
) -> Iterator[MemoryRecording]:
    """Record all allocations of the block, on a CUDA device, and write them to a file.

    It uses the history of torch's own allocator (`torch.cuda.memory._record_memory_history`), so
    the program runs as without it, a little slower. The file is also
    written where the block raises, as it does when memory runs out; that error then names
    the lines of code that hold most, and what to do.

    path: the file to write. `oxytorch memory show`, `replay` and `advise` read it.
    device: the device whose allocations are wanted, by default the current one.
    stacks: whether to note the line of Python code that asks for each allocation.
    max_events: room for so many events; earlier ones are lost, with a warning.

    Raises:
        RuntimeError: no CUDA device, another allocator than torch's native one, or a history that
            somebody else records.
    """
    _check_arguments(path, max_events)
    index = _device(device)
    traces.check_target(path)
    before = torch.cuda.memory_stats(index)
    context: Any = "alloc" if stacks else None
    torch.cuda.memory._record_memory_history(
        "all", context=context, stacks="python", max_entries=max_events
    )
    recording = MemoryRecording()
    ended: torch.OutOfMemoryError | None = None
    try:
        yield recording
    except torch.OutOfMemoryError as error:
        ended = error
        raise
    finally:
        after = torch.cuda.memory_stats(index)
        found = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
        recording.trace = _trace(found, index, before, after, recording._marks)
        traces.save(recording.trace, path)
        if ended is not None:
            ended.args = (f"{ended}\n{_out_of_memory(recording.trace, path)}",)
        lost = recording.trace.about.lost
        if lost:
            warnings.warn(_lost(path, lost, max_events), stacklevel=3)


def _check_arguments(path: str | os.PathLike[str], max_events: int) -> None:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"record: path: expected the name of a file to write, got {path!r}")
    if isinstance(max_events, bool) or not isinstance(max_events, int):
        raise TypeError(f"record: max_events: expected an integer, got {max_events!r}")
    if max_events < 1:
        raise ValueError(f"record: max_events: expected at least 1, got {max_events}")


def _lost(path: str | os.PathLike[str], lost: int, max_events: int) -> str:
    return (
        f"oxytorch.memory.record: {path} lacks the first {lost} allocations: there was room for "
        f"{max_events} events. Record with a larger max_events"
    )


def _out_of_memory(trace: Trace, path: str | os.PathLike[str]) -> str:
    """Who holds memory at the end of a trace, and what shows more."""
    lines = ["Most is held by"]
    for held, count, site in traces.holders(trace, 5, len(trace) - 1):
        lines.append(f"  {size(held)} in {count} allocations: {site}")
    lines.append(f"Which allocator or setting would serve it: oxytorch memory advise {path}")
    return "\n".join(lines)


def _device(device: torch.device | int | str | None) -> int:
    if not torch.cuda.is_available():
        raise RuntimeError(
            "record: needs a CUDA device, and torch finds none. Traces can be replayed anywhere: "
            "record where the program runs"
        )
    torch.cuda.init()  # type: ignore[no-untyped-call]
    if torch.cuda.get_allocator_backend() != "native":
        raise RuntimeError(
            f"record: needs torch's native allocator, found {torch.cuda.get_allocator_backend()}: "
            "unset backend in PYTORCH_ALLOC_CONF, and do not use another allocator here"
        )
    if torch._C._cuda_isHistoryEnabled():
        raise RuntimeError(
            "record: torch's allocation history is being recorded already; stop that first with "
            "torch.cuda.memory._record_memory_history(None)"
        )
    chosen = device_of(device)
    if chosen.type != "cuda":
        raise ValueError(f"record: expected a CUDA device, got {chosen}")
    return torch.cuda.current_device() if chosen.index is None else chosen.index


def _trace(
    found: Any,
    device: int,
    before: dict[str, Any],
    after: dict[str, Any],
    marks: list[tuple[int, str]],
) -> Trace:
    """The trace of what happened between two statistics of torch."""
    properties = torch.cuda.get_device_properties(device)
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    history = found["device_traces"][device]
    recorded = sum(entry["action"] == "alloc" for entry in history)
    about = About(
        program=Path(sys.argv[0]).name,
        device=properties.name,
        total_memory=properties.total_memory,
        limit=int(fraction * properties.total_memory) if fraction < 1 else None,
        torch=torch.__version__,
        **snapshot.described(found.get("allocator_settings", {})),
        lost=max(0, _grown("allocation.all.allocated", before, after) - recorded),
        # Peaks from before the recording are not its own.
        peak_allocated=_peak("allocated_bytes.all.peak", before, after),
        peak_reserved=_peak("reserved_bytes.all.peak", before, after),
        device_allocations=_grown("num_device_alloc", before, after),
        retries=_grown("num_alloc_retries", before, after),
    )
    segments = [each for each in found["segments"] if each["device"] == device]
    return snapshot.from_history(history, segments, about, marks)


def _grown(name: str, before: dict[str, Any], after: dict[str, Any]) -> int:
    return int(after.get(name, 0)) - int(before.get(name, 0))


def _peak(name: str, before: dict[str, Any], after: dict[str, Any]) -> int | None:
    """A peak within the recording; None if it was earlier."""
    now, then = int(after.get(name, 0)), int(before.get(name, 0))
    return now if now > then else None
