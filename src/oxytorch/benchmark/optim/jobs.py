"""`oxytorch bench optim`: every optimizer, on every set of tensors, in every format."""

from __future__ import annotations

from oxytorch.benchmark.core.jobs import Job, Settings, contest
from oxytorch.benchmark.core.subject import Option, Subject, names, peers
from oxytorch.benchmark.optim import runs
from oxytorch.benchmark.optim.cases import CASES, FORMATS, OPTIMIZERS
from oxytorch.benchmark.optim.contestants import PEERS

ONLY = names(
    "--only", "only", "optimizers to measure, such as AdamW (default: all)", lambda: OPTIMIZERS
)


def formats(text: str) -> Option:
    """The option --format."""
    return names("--format", "formats", f"formats of oxytorch{text}", lambda: FORMATS)


def _jobs(settings: Settings) -> list[Job]:
    labels = {name: PEERS[name] for name in settings.peers}
    return [
        contest(f"{name} {case}", runs, settings, labels, optimizer=name, case=case)
        for case in settings.cases or CASES
        for name in settings.only or OPTIMIZERS
    ]


SUBJECT = Subject(
    "optim",
    "steps of every optimizer",
    15,
    _jobs,
    (
        ONLY,
        names("--case", "cases", "tensors: bert,small (default: both)", lambda: CASES),
        peers("contestants (default: foreach,fused,predecessor,oxytorch)", PEERS),
        formats(", such as split+int8 (default: all)"),
    ),
)
