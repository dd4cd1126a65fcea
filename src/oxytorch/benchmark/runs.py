"""The runs behind the subcommands: which jobs, in which order, and what is kept of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oxytorch.benchmark import cold_start, gpu_optim_cases, optim_cases
from oxytorch.benchmark.jobs import JobError, run_contest, run_once
from oxytorch.benchmark.models import CASES
from oxytorch.benchmark.peers import PEERS
from oxytorch.benchmark.results import new_run
from oxytorch.benchmark.terminal import Watcher, watching

OnResult = Callable[[dict[str, Any]], None]
"""Called with the run after every job, so that an interrupted run keeps what it has."""


@dataclass(frozen=True)
class Settings:
    """What the options say, for every kind of run.

    Attributes:
        only: names of models, ops or optimizers.
        dtypes: names of dtypes.
        peers: names of peers.
        rounds: interleaved rounds.
        threads: threads for every contestant.
        batch: batch size of models; None means each model's own.
        sizes: of the samples of ops: cache, memory.
        levels: ISA levels at which oxytorch's ops run; none means the active one.
        cases: sets of tensors that optimizers update.
        formats: storage formats of oxytorch's optimizers.
        device: of cold starts: cuda, cpu.
        allocation: "reuse" keeps freed memory (see `allocation.py`), "system" does not.
        silence: seconds without any sign of life after which a peer is given up.
    """

    only: tuple[str, ...]
    dtypes: tuple[str, ...]
    peers: tuple[str, ...]
    rounds: int
    threads: int
    batch: int | None = None
    sizes: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    device: str = "cuda"
    allocation: str = "reuse"
    silence: float = 300.0


def _start(kind: str, command: str, settings: Settings) -> dict[str, Any]:
    run = new_run(kind, command, asdict(settings))
    load = run["machine"]["load"]
    if load is not None and load > 0.5:
        print(
            f"oxytorch bench: other programs keep this machine busy (load {load}); "
            f"expect wrong numbers",
            file=sys.stderr,
        )
    return run


def _collect(
    run: dict[str, Any],
    jobs: Sequence[tuple[str, Callable[[Watcher], list[dict[str, Any]]]]],
    on_result: OnResult,
) -> dict[str, Any]:
    """Do all jobs; one that fails is told on standard error and noted in `run["failures"]`."""
    run["failures"] = []
    with watching(len(jobs)) as watcher:
        for title, do in jobs:
            watcher.start(title)
            try:
                run["results"] += do(watcher)
            except JobError as error:
                print(f"oxytorch bench: {title}: {error}", file=sys.stderr)
                run["failures"].append({"job": title, "reason": str(error)})
            watcher.finish()
            on_result(run)
    return run


def run_models(settings: Settings, command: str, on_result: OnResult) -> dict[str, Any]:
    """Every model asked for, in every dtype, with all peers."""
    jobs = []
    for name in settings.only or CASES:
        for dtype in settings.dtypes:
            job = {
                "kind": "model",
                "model": name,
                "dtype": dtype,
                "peers": list(settings.peers or PEERS),
                "batch": settings.batch or CASES[name].batch,
                "rounds": settings.rounds,
                "threads": settings.threads,
                "allocation": settings.allocation,
            }
            jobs.append((f"{name} {dtype}", _contest(job, settings.silence)))
    return _collect(_start("models", command, settings), jobs, on_result)


def run_ops(settings: Settings, command: str, on_result: OnResult) -> dict[str, Any]:
    """Every op of the registry, or those asked for, in every dtype."""
    registry = importlib.import_module("oxytorch.ops").registry()
    jobs = []
    for name in settings.only or registry:
        for dtype in settings.dtypes:
            job = {
                "kind": "op",
                "op": name,
                "dtype": dtype,
                "sizes": list(settings.sizes),
                "peers": list(settings.peers),
                "levels": list(settings.levels),
                "rounds": settings.rounds,
                "threads": settings.threads,
                "allocation": settings.allocation,
            }
            jobs.append((f"{name} {dtype}", _contest(job, settings.silence)))
    return _collect(_start("ops", command, settings), jobs, on_result)


def run_optim(settings: Settings, command: str, on_result: OnResult) -> dict[str, Any]:
    """Every optimizer asked for, on every set of tensors, in every format."""
    jobs = []
    for case in settings.cases or optim_cases.CASES:
        for name in settings.only or optim_cases.OPTIMIZERS:
            job = {
                "kind": "optim",
                "optimizer": name,
                "case": case,
                "peers": list(settings.peers),
                "labels": optim_cases.PEERS,
                "formats": list(settings.formats or optim_cases.FORMATS),
                "rounds": settings.rounds,
                "threads": settings.threads,
                "allocation": settings.allocation,
            }
            jobs.append((f"{name} {case}", _contest(job, settings.silence)))
    return _collect(_start("optim", command, settings), jobs, on_result)


def run_gpu_optim(settings: Settings, command: str, on_result: OnResult) -> dict[str, Any]:
    """Every optimizer asked for on the GPU, in one process: starting one there takes long."""
    job = {
        "kind": "gpu-optim",
        "optimizers": list(settings.only or optim_cases.OPTIMIZERS),
        "cases": list(settings.cases or gpu_optim_cases.CASES),
        "peers": list(settings.peers),
        "labels": gpu_optim_cases.PEERS,
        "formats": list(settings.formats or gpu_optim_cases.DEFAULT_FORMATS),
        "rounds": settings.rounds,
        "allocation": settings.allocation,
    }
    jobs = [("steps on the GPU", _contest(job, settings.silence))]
    return _collect(_start("gpu-optim", command, settings), jobs, on_result)


def run_cold_start(settings: Settings, command: str, on_result: OnResult) -> dict[str, Any]:
    """The first step of a process, in every way."""
    jobs = []
    for case in settings.cases or ("resnet50",):
        for name in settings.peers:
            jobs.append((f"{name} {case}", _cold_start(name, case, settings)))
    return _collect(_start("cold-start", command, settings), jobs, on_result)


def _cold_start(
    name: str, case: str, settings: Settings
) -> Callable[[Watcher], list[dict[str, Any]]]:
    return lambda watcher: cold_start.measure(
        (name,), case, settings.device, settings.rounds, settings.silence
    )


def _contest(job: dict[str, Any], silence: float) -> Callable[[Watcher], list[dict[str, Any]]]:
    return lambda watcher: run_contest(job, silence, watcher.stage)


def run_limits(settings: Settings, command: str, on_result: OnResult) -> dict[str, Any]:
    """The machine's limits."""
    job = {
        "kind": "limits",
        "threads": settings.threads,
        "rounds": settings.rounds,
        "allocation": settings.allocation,
    }
    jobs = [("limits", lambda watcher: run_once(job, settings.silence, watcher.stage))]
    return _collect(_start("limits", command, settings), jobs, on_result)


def run_import_time(settings: Settings, command: str, on_result: OnResult) -> dict[str, Any]:
    """The time that `import oxytorch` adds."""
    from oxytorch.benchmark.costs import measure_import_time

    jobs = [("import time", lambda watcher: [measure_import_time()])]
    return _collect(_start("costs", command, settings), jobs, on_result)


def run_optimize_cost(settings: Settings, command: str, on_result: OnResult) -> dict[str, Any]:
    """Time and peak memory of `optimize`, on a copy and in place."""
    jobs = []
    for name in settings.only or ("bert",):
        for dtype in settings.dtypes:
            for inplace in (False, True):
                job = {
                    "kind": "optimize",
                    "model": name,
                    "dtype": dtype,
                    "inplace": inplace,
                    "allocation": "system",
                }
                title = f"optimize {name} {dtype} {'in place' if inplace else 'on a copy'}"
                jobs.append((title, _single(job, settings.silence)))
    return _collect(_start("costs", command, settings), jobs, on_result)


def _single(job: dict[str, Any], silence: float) -> Callable[[Watcher], list[dict[str, Any]]]:
    return lambda watcher: run_once(job, silence, watcher.stage)
