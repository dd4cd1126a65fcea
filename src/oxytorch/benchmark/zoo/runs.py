"""Whole models of many kinds beside stock PyTorch, with the defaults of `optimize`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from oxytorch import isa
from oxytorch.benchmark.core.contest import Progress
from oxytorch.benchmark.core.jobs import Settings
from oxytorch.benchmark.core.results import Result
from oxytorch.benchmark.models.contestants import Peer, by_name, optimized
from oxytorch.benchmark.models.runs import run_model
from oxytorch.benchmark.models.task import Runner, Task
from oxytorch.benchmark.peers.stock import prepare_eager, prepare_eager_cast, prepare_float32
from oxytorch.benchmark.zoo.cases import ZOO


def prepare_optimized(task: Task, with_sample: bool) -> Runner:
    """`oxytorch.optimize` with its defaults, with or without `sample_input`."""
    given: dict[str, Any] = {"sample_input": task.inputs} if with_sample else {}
    return optimized(task, dtype=None if task.dtype == torch.float32 else task.dtype, **given)


CONTESTANTS = by_name(
    Peer("eager", "torch", prepare_eager),
    Peer("eager_cast", "torch, cast", prepare_eager_cast),
    Peer("float32", "torch, float32", prepare_float32),
    Peer("oxytorch", "oxytorch", partial(prepare_optimized, with_sample=False)),
    Peer(
        "oxytorch_sample",
        "oxytorch, sample_input",
        partial(prepare_optimized, with_sample=True),
    ),
)
"""Stock ways and ours by name. In bfloat16 `eager` runs under autocast."""

OURS = ("oxytorch", "oxytorch_sample")


def contestants(dtype: str) -> list[str]:
    """Who takes part in a dtype: in float32 the ways of stock PyTorch are one and the same."""
    return [name for name in CONTESTANTS if dtype != "float32" or name in ("eager", *OURS)]


_run = partial(run_model, contestants=CONTESTANTS, eager_may_fail=True)


def run_job(progress: Progress, settings: Settings, model: str, dtype: str, batch: int) -> Result:
    """Measure one model for the worker process."""
    result = _run(ZOO[model], dtype, settings, batch=batch, progress=progress)
    return {**result, "level": str(isa.active())}
