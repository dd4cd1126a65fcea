"""`oxytorch bench zoo`: every model in every dtype and batch size; losses are listed."""

from __future__ import annotations

import sys
from functools import partial

from oxytorch.benchmark.core.contest import Progress
from oxytorch.benchmark.core.jobs import Job, OnResult, Settings, contest
from oxytorch.benchmark.core.results import Result
from oxytorch.benchmark.core.subject import Option, Subject, dtypes, names
from oxytorch.benchmark.zoo import runs
from oxytorch.benchmark.zoo.cases import ZOO
from oxytorch.benchmark.zoo.tables import lost
from oxytorch.command_line import positive, words


def _jobs(settings: Settings) -> list[Job]:
    jobs = []
    for model in settings.only or ZOO:
        for batch in settings.batches:
            for dtype in settings.dtypes:
                labels = {name: runs.CONTESTANTS[name].label for name in runs.contestants(dtype)}
                name = f"{model} {dtype} batch {batch}"
                job = contest(name, runs, settings, labels, model=model, dtype=dtype, batch=batch)
                jobs.append(Job(name, partial(_tell_losses, job)))
    return jobs


def _tell_losses(job: Job, progress: Progress, on_result: OnResult) -> None:
    def tell(result: Result) -> None:
        on_result(result)
        for line in lost(result):
            print(f"oxytorch bench: lost: {line}", file=sys.stderr, flush=True)

    job.do(progress, tell)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(positive, words(text)))


_BATCH = {
    "type": _sizes,
    "default": (1, 8),
    "metavar": "N,M,...",
    "help": "batch sizes (default: 1,8)",
}

SUBJECT = Subject(
    "zoo",
    "models of many kinds beside stock PyTorch: which are slower?",
    7,
    _jobs,
    (
        names("--models", "only", "models to measure (default: all)", lambda: ZOO),
        dtypes(),
        Option("--batch", "batches", _BATCH),
    ),
)
