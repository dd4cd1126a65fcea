"""The runs behind the subcommands: which jobs each consists of, and how they are done."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from oxytorch.benchmark.core.jobs import JobError, OnResult, run_contest, run_once
from oxytorch.benchmark.core.kept import Run, keeping
from oxytorch.benchmark.core.results import new_run
from oxytorch.benchmark.gpu import cases as gpu_optim_cases
from oxytorch.benchmark.gpu import cold_start
from oxytorch.benchmark.models.cases import CASES
from oxytorch.benchmark.models.contestants import PEERS
from oxytorch.benchmark.optim import cases as optim_cases
from oxytorch.benchmark.report.terminal import Watcher, watching
from oxytorch.benchmark.zoo import cases as zoo_models
from oxytorch.benchmark.zoo import runs as zoo_runs


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
        batches: batch sizes of the zoo's models.
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
    do: Callable[[Watcher, OnResult], None]


def start(what: str, command: str, settings: Settings) -> Run:
    """The head of a run's file; says on standard error where the machine is busy."""
    run = new_run(KINDS.get(what, what), command, asdict(settings))
    load = run["machine"]["load"]
    if load is not None and load > 0.5:
        print(
            f"oxytorch bench: other programs keep this machine busy (load {load}); "
            f"expect wrong numbers",
            file=sys.stderr,
        )
    return run


def measure(what: str, settings: Settings, run: Run, paths: Sequence[Path]) -> Run:
    """Do the jobs of a kind of run that are left; `paths` hold every result as soon as it is there.

    A job that fails is told on standard error and noted in `run["failures"]`.
    """
    jobs = {job.name: job for job in JOBS[what](settings)}
    with keeping(run, list(jobs), paths) as kept, watching(len(kept.left())) as watcher:
        for name in kept.left():
            watcher.start(name)
            try:
                jobs[name].do(watcher, kept.add)
            except JobError as error:
                kept.fail(name, str(error))
            else:
                kept.finish(name)
            watcher.finish()
    return run


def _contest(name: str, job: dict[str, Any], settings: Settings) -> Job:
    return Job(
        name,
        lambda watcher, on_result: run_contest(job, settings.silence, watcher.stage, on_result),
    )


def _single(name: str, job: dict[str, Any], settings: Settings) -> Job:
    return Job(
        name, lambda watcher, on_result: run_once(job, settings.silence, watcher.stage, on_result)
    )


def model_jobs(settings: Settings) -> list[Job]:
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
            jobs.append(_contest(f"{name} {dtype}", job, settings))
    return jobs


def zoo_jobs(settings: Settings) -> list[Job]:
    """Every model of the zoo, in every dtype and batch size; what it loses is told as it comes."""
    jobs = []
    for name in settings.only or zoo_models.ZOO:
        for batch in settings.batches:
            for dtype in settings.dtypes:
                names = zoo_runs.contestants(dtype)
                job = {
                    "kind": "zoo",
                    "model": name,
                    "dtype": dtype,
                    "batch": batch,
                    "peers": names,
                    "labels": {peer: zoo_runs.CONTESTANTS[peer].label for peer in names},
                    "rounds": settings.rounds,
                    "threads": settings.threads,
                    "allocation": settings.allocation,
                }
                contest = _contest(f"{name} {dtype} batch {batch}", job, settings)
                jobs.append(Job(contest.name, partial(_tell_losses, contest)))
    return jobs


def _tell_losses(contest: Job, watcher: Watcher, on_result: OnResult) -> None:
    def tell(result: dict[str, Any]) -> None:
        on_result(result)
        for line in zoo_runs.lost(result):
            print(f"oxytorch bench: lost: {line}", file=sys.stderr, flush=True)

    contest.do(watcher, tell)


def op_jobs(settings: Settings) -> list[Job]:
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
            jobs.append(_contest(f"{name} {dtype}", job, settings))
    return jobs


def optim_jobs(settings: Settings) -> list[Job]:
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
            jobs.append(_contest(f"{name} {case}", job, settings))
    return jobs


def gpu_optim_jobs(settings: Settings) -> list[Job]:
    """Every optimizer asked for on the GPU; one process for a case, as starting one takes long."""
    jobs = []
    for case in settings.cases or gpu_optim_cases.CASES:
        job = {
            "kind": "gpu-optim",
            "optimizers": list(settings.only or optim_cases.OPTIMIZERS),
            "cases": [case],
            "peers": list(settings.peers),
            "labels": gpu_optim_cases.PEERS,
            "formats": list(settings.formats or gpu_optim_cases.DEFAULT_FORMATS),
            "rounds": settings.rounds,
            "allocation": settings.allocation,
        }
        jobs.append(_contest(f"steps on the GPU {case}", job, settings))
    return jobs


def cold_start_jobs(settings: Settings) -> list[Job]:
    """The first step of a process, in every way."""

    def measure_way(name: str, case: str, watcher: Watcher, on_result: OnResult) -> None:
        way, tensors = cold_start.WAYS[name], gpu_optim_cases.CASES[case]
        on_result(
            cold_start.measure_way(way, tensors, settings.device, settings.rounds, settings.silence)
        )

    return [
        Job(f"{name} {case}", partial(measure_way, name, case))
        for case in settings.cases or ("resnet50",)
        for name in settings.peers
    ]


def limit_jobs(settings: Settings) -> list[Job]:
    """The machine's limits."""
    job = {
        "kind": "limits",
        "threads": settings.threads,
        "rounds": settings.rounds,
        "allocation": settings.allocation,
    }
    return [_single("limits", job, settings)]


def import_time_jobs(settings: Settings) -> list[Job]:
    """The time that `import oxytorch` adds."""
    from oxytorch.benchmark.machine.costs import measure_import_time

    return [Job("import time", lambda watcher, on_result: on_result(measure_import_time()))]


def optimize_cost_jobs(settings: Settings) -> list[Job]:
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
                jobs.append(_single(title, job, settings))
    return jobs


JOBS: dict[str, Callable[[Settings], list[Job]]] = {
    "models": model_jobs,
    "zoo": zoo_jobs,
    "ops": op_jobs,
    "optim": optim_jobs,
    "gpu-optim": gpu_optim_jobs,
    "cold-start": cold_start_jobs,
    "limits": limit_jobs,
    "import-time": import_time_jobs,
    "optimize-cost": optimize_cost_jobs,
}
"""Subcommand -> its jobs."""

KINDS = {"import-time": "costs", "optimize-cost": "costs"}
"""Subcommand -> kind of run in its files, where that has another name."""
