"""Jobs: the things that a run measures, each in a process of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from oxytorch.benchmark.core.contest import Progress, new_record, refuse
from oxytorch.benchmark.core.processes import JobError, Process
from oxytorch.benchmark.core.results import Result
from oxytorch.benchmark.machine.allocation import keep_freed_memory

OnResult = Callable[[Result], None]
"""Called with every result as it comes."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the options say, for every subject; empty where all is meant.

    Attributes:
        only: names of models, ops or optimizers.
        dtypes: names of dtypes.
        peers: names of peers.
        rounds: interleaved rounds.
        threads: threads for every contestant.
        batch: batch size of models; None means each model's own.
        batches: batch sizes of the zoo's models.
        sizes: of the samples of ops: cache, memory.
        levels: ISA levels at which oxytorch's ops run; none means the active one.
        cases: sets of tensors that optimizers update.
        formats: storage formats of oxytorch's optimizers.
        device: of cold starts: cuda, cpu.
        allocation: "reuse" keeps freed memory (see `allocation.py`), "system" does not.
        silence: seconds without any sign of life after which a peer is given up.
    """

    only: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    rounds: int
    threads: int
    batch: int | None = None
    batches: tuple[int, ...] = ()
    sizes: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    device: str = "cuda"
    allocation: str = "reuse"
    silence: float = 300.0


@dataclass(frozen=True)
class Job:
    """One thing to measure.

    name: says what, and is no other job's of the run.
    do: measures it and hands on each result as it comes; raises JobError where it cannot.
    """

    name: str
    do: Callable[[Progress, OnResult], None]


def single(name: str, module: ModuleType, settings: Settings, **what: Any) -> Job:
    """A job without contestants: `run_job(progress, settings, **what)` of the module."""
    return Job(name, partial(run_once, module.__name__, settings, what))


def contest(
    name: str, module: ModuleType, settings: Settings, labels: Mapping[str, str], **what: Any
) -> Job:
    """As `single`, with these contestants as `settings.peers`, whom `labels` calls in tables."""
    return Job(name, partial(run_contest, module.__name__, settings, what, labels))


def run_once(
    module: str,
    settings: Settings,
    what: Mapping[str, Any],
    progress: Progress,
    on_result: OnResult,
) -> None:
    """Run a job in a new process; results come with the allocation they were measured under.

    Raises:
        JobError: the process reported an error, died, or was silent for too long.
    """
    process = Process(settings.silence)
    arguments = {"module": module, "settings": asdict(settings), "what": what}
    try:
        for result in process.call(__name__, "measured", arguments, progress):
            on_result(result)
    finally:
        process.close()


def measured(
    progress: Progress, module: str, settings: dict[str, Any], what: dict[str, Any]
) -> Iterator[Result]:
    """The results of a job, measured in this process."""
    chosen = Settings(**settings)
    torch.set_num_threads(chosen.threads)
    allocation = keep_freed_memory() if chosen.allocation == "reuse" else "system"
    found = importlib.import_module(module).run_job(progress, chosen, **what)
    for result in [found] if isinstance(found, dict) else found:
        yield {**result, "allocation": allocation}


def run_contest(
    module: str,
    settings: Settings,
    what: Mapping[str, Any],
    labels: Mapping[str, str],
    progress: Progress,
    on_result: OnResult,
) -> None:
    """As `run_once`; peers that took the process down are in the results with status "failed".

    After such a death everything is measured again without the peer, and comes again.

    Raises:
        JobError: the process failed in a part that belongs to no peer that could be left out.
    """
    lost: dict[str, str] = {}

    def with_lost(result: Result) -> None:
        for peer, reason in lost.items():
            record = new_record(peer, labels[peer])
            refuse(record, "failed", reason)
            result["peers"].append(record)
        on_result(result)

    while True:
        left = tuple(peer for peer in labels if peer not in lost)
        try:
            return run_once(module, replace(settings, peers=left), what, progress, with_lost)
        except JobError as error:
            if error.peer not in left or error.peer == "eager":
                raise
            lost[error.peer] = str(error)
