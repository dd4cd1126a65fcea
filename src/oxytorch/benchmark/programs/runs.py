"""Whole models as programs, beside the other passes of `optimize` and stock PyTorch."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import oxytorch
from oxytorch.benchmark.core.contest import Progress
from oxytorch.benchmark.core.jobs import Settings
from oxytorch.benchmark.core.results import Result
from oxytorch.benchmark.models.cases import CASES
from oxytorch.benchmark.models.contestants import Peer, by_name, optimized
from oxytorch.benchmark.models.runs import run_model
from oxytorch.benchmark.models.task import Runner, Task
from oxytorch.benchmark.zoo import runs as zoo
from oxytorch.benchmark.zoo.cases import ZOO

MODELS = {**ZOO, **CASES}

PASSES, PROGRAM = "oxytorch_passes", "oxytorch_program"


def why_none(model: nn.Module) -> str | None:
    """Why an optimized model is no program; None where it is one."""
    report = oxytorch.explain(model)
    entries = [entry for entry in report.entries if entry.pass_name == "program"]
    if any(entry.applied for entry in entries):
        return None
    if entries:
        return entries[0].detail
    lines = report.tuned["lines"] if report.tuned is not None else ()
    timed = [text for name, text in lines if name == "with program"]
    return f"with it: {timed[0]}" if timed else "the passes that are faster leave none"


def _prepared(graph: bool, task: Task) -> Runner:
    """`oxytorch.optimize(model, sample_input=..., graph=...)`."""
    return optimized(
        task,
        lambda model: {"no_program": why_none(model)} if graph else {},
        dtype=None if task.dtype == torch.float32 else task.dtype,
        sample_input=task.inputs,
        graph=graph,
    )


CONTESTANTS = {
    **{name: peer for name, peer in zoo.CONTESTANTS.items() if name not in zoo.OURS},
    **by_name(
        Peer(PASSES, "oxytorch, no graph", partial(_prepared, False)),
        Peer(PROGRAM, "oxytorch, graph", partial(_prepared, True)),
    ),
}
"""Stock ways, and ours with `sample_input`, with `graph=False` and with `graph=True`."""


def contestants(dtype: str) -> list[str]:
    """Who takes part in a dtype."""
    return [*(name for name in zoo.contestants(dtype) if name in CONTESTANTS), PASSES, PROGRAM]


_run = partial(run_model, contestants=CONTESTANTS, eager_may_fail=True)


def run_job(
    progress: Progress, settings: Settings, model: str, dtype: str, batch: int | None
) -> Result:
    """Measure one model for the worker process."""
    return _run(MODELS[model], dtype, settings, batch=batch, progress=progress)
