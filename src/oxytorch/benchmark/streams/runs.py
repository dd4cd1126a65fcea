"""A whole model in one stream and in several, on the same cores."""

from __future__ import annotations

import time
from functools import partial

import torch
from torch.utils import _pytree as pytree

import oxytorch
from oxytorch.benchmark.core.contest import Progress
from oxytorch.benchmark.core.jobs import Settings
from oxytorch.benchmark.core.results import Result
from oxytorch.benchmark.models.cases import CASES, call_model
from oxytorch.benchmark.models.contestants import Peer, by_name
from oxytorch.benchmark.models.runs import run_model
from oxytorch.benchmark.models.task import Runner, Task
from oxytorch.benchmark.peers.stock import prepare_eager
from oxytorch.runtime import CPUPool, MultiStreamModule, MultiStreamModuleHint, pin
from oxytorch.runtime.pool import shares

BATCH = 16
MOST = 256


def prepare_streams(task: Task, streams: int) -> Runner:
    """`MultiStreamModule` of an optimized model, which is optimized on one stream's cores."""
    cores = CPUPool().core_ids[: task.threads]
    of_stream = shares(cores, streams)[0]
    batch = len(pytree.tree_leaves(task.inputs)[0])
    sample = pytree.tree_map(lambda tensor: tensor[: -(-batch // streams)], task.inputs)
    start = time.perf_counter()
    with pin(CPUPool(of_stream)):
        model = oxytorch.optimize(
            task.model,
            dtype=None if task.dtype == torch.float32 else task.dtype,
            sample_input=sample,
            graph=True,
        )
    hint = (
        MultiStreamModuleHint(**dict.fromkeys(task.inputs, 0))
        if isinstance(task.inputs, dict)
        else MultiStreamModuleHint(*[0] * len(task.inputs))
    )
    module = MultiStreamModule(model, streams, CPUPool(cores), input_split_hint=hint)
    notes: dict[str, object] = {
        "optimize_seconds": time.perf_counter() - start,
        "streams": streams,
        "cores_of_first": len(of_stream),
    }
    return Runner(lambda: call_model(module, task.inputs), notes=notes)


def counts(threads: int) -> list[int]:
    """How many streams there are in turn: 1, 2, 4, ... and one for each thread."""
    powers = [1 << power for power in range(MOST.bit_length()) if 1 << power < threads]
    return [*powers, threads]


def name_of(streams: int) -> str:
    """The contestant's name."""
    return f"streams_{streams}"


CONTESTANTS = by_name(
    Peer("eager", "torch", prepare_eager),
    *(
        Peer(name_of(streams), f"{streams} streams", partial(prepare_streams, streams=streams))
        for streams in range(1, MOST + 1)
    ),
)


def run_job(progress: Progress, settings: Settings, model: str, dtype: str, batch: int) -> Result:
    """Measure one model for the worker process."""
    return run_model(
        CASES[model], dtype, settings, batch=batch, progress=progress, contestants=CONTESTANTS
    )
