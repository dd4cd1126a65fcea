"""`oxytorch bench streams`: models, dtypes and batch sizes."""

from __future__ import annotations

from oxytorch.benchmark.core.jobs import Job, Settings, contest
from oxytorch.benchmark.core.subject import Option, Subject, dtypes, names
from oxytorch.benchmark.models.cases import CASES
from oxytorch.benchmark.streams import runs
from oxytorch.command_line import positive


def _jobs(settings: Settings) -> list[Job]:
    batch = settings.batch or runs.BATCH
    peers = ["eager", *map(runs.name_of, runs.counts(settings.threads))]
    labels = {peer: runs.CONTESTANTS[peer].label for peer in peers}
    return [
        contest(
            f"{model} {dtype} batch {batch}",
            runs,
            settings,
            labels,
            model=model,
            dtype=dtype,
            batch=batch,
        )
        for model in settings.only
        for dtype in settings.dtypes
    ]


_BATCH = {"type": positive, "default": runs.BATCH, "help": f"batch size (default: {runs.BATCH})"}

SUBJECT = Subject(
    "streams",
    "a model in one stream and in several (MultiStreamModule)",
    7,
    _jobs,
    (
        names(
            "--models",
            "only",
            "models to measure (default: resnet50)",
            lambda: CASES,
            ("resnet50",),
        ),
        dtypes(),
        Option("--batch", "batch", _BATCH),
    ),
)
