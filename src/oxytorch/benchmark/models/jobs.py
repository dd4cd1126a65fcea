"""`oxytorch bench models`: every model in every dtype, with all peers."""

from __future__ import annotations

from oxytorch.benchmark.core.jobs import Job, Settings, contest
from oxytorch.benchmark.core.subject import Option, Subject, dtypes, names, peers
from oxytorch.benchmark.models import runs
from oxytorch.benchmark.models.cases import CASES
from oxytorch.benchmark.models.contestants import PEERS
from oxytorch.command_line import positive


def _jobs(settings: Settings) -> list[Job]:
    labels = {name: PEERS[name].label for name in settings.peers}
    return [
        contest(f"{name} {dtype}", runs, settings, labels, model=name, dtype=dtype)
        for name in settings.only or CASES
        for dtype in settings.dtypes
    ]


_BATCH = {"type": positive, "help": "batch size (default: each model's own)"}

SUBJECT = Subject(
    "models",
    "whole models with random weights",
    15,
    _jobs,
    (
        names("--only", "only", "models to measure (default: all)", lambda: CASES),
        dtypes("precisions (default: float32,bfloat16; int8: static quantization)", "int8"),
        peers("contestants (default: all); eager always takes part", PEERS),
        Option("--batch", "batch", _BATCH),
    ),
)
