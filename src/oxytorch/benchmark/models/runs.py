"""One model in one dtype: build the peers, check their outputs, time them in turns."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from oxytorch.benchmark.core.contest import (
    Progress,
    add_times,
    judge,
    largest_difference,
    new_record,
    no_progress,
    refuse,
    refuse_for,
)
from oxytorch.benchmark.core.jobs import Settings
from oxytorch.benchmark.core.results import Record, Result, is_measured
from oxytorch.benchmark.core.rounds import interleave, spread
from oxytorch.benchmark.models.cases import (
    CASES,
    Inputs,
    ModelCase,
    call_model,
    cast_tensors,
    output_tensors,
)
from oxytorch.benchmark.models.contestants import PEERS, Peer
from oxytorch.benchmark.models.task import Runner, Task


def run_model(
    case: ModelCase,
    dtype: str,
    settings: Settings,
    *,
    batch: int | None = None,
    progress: Progress = no_progress,
    contestants: Mapping[str, Peer] = PEERS,
    eager_may_fail: bool = False,
) -> Result:
    """Measure one model in one dtype with the peers of the settings; the result as JSON.

    `eager` always takes part: it gives the correct outputs and is the base of the ratios.
    batch: None means the model's own.
    contestants: the peers by name.
    eager_may_fail: whether its failure is a result like the others' (autocast does not run every
        model); then there are no ratios to it.
    """
    names = dict.fromkeys(["eager", *settings.peers])
    invited = [contestants[name] for name in names]
    batch = batch or case.batch
    with torch.no_grad():
        progress("eager", "build")
        task = Task(*case.build(batch), getattr(torch, dtype), settings.threads)
        expected = [tensor.clone() for tensor in _float32_answer(task)]
        progress("eager", "alone")
        alone = _time_alone(invited[0], task, max(1, settings.rounds // 2), eager_may_fail)
        build = partial(case.build, batch)
        records, runners = _line_up(invited, task, build, expected, progress)
        eager = records[0]
        if not is_measured(eager) and not eager_may_fail:
            raise RuntimeError(f"{case.name}: eager is {eager['status']}: {eager['reason']}")
        _time_together(records, runners, settings.rounds, progress)
    together = eager["seconds"]["median"] if is_measured(eager) else None
    return {
        "model": case.name,
        "title": case.title,
        "dtype": dtype,
        "batch": batch,
        "threads": settings.threads,
        "parameters": sum(parameter.numel() for parameter in task.model.parameters()),
        "eager_alone_seconds": alone,
        "eager_interleaved_over_alone": together / alone if together and alone else None,
        "peers": records,
    }


def _float32_answer(task: Task) -> list[Tensor]:
    return output_tensors(call_model(task.model, task.inputs))


def _time_alone(eager: Peer, task: Task, rounds: int, may_fail: bool) -> float | None:
    """Seconds of the eager model before any other peer is loaded in this process."""
    try:
        runner = eager.prepare(task)
        runner.call()
    except Exception:  # which is noted as its result when its turn comes
        if not may_fail:
            raise
        return None
    return spread(interleave({"eager": runner.call}, rounds=rounds)["eager"])["median"]


def _line_up(
    peers: Sequence[Peer],
    task: Task,
    build: Callable[[], tuple[nn.Module, Inputs]],
    expected: Sequence[Tensor],
    progress: Progress,
) -> tuple[list[Record], dict[str, Runner]]:
    """A record of every peer, and those who are ready; their outputs are judged.

    build: makes the model of the task again, which a peer may have changed.
    """
    records: list[Record] = []
    runners: dict[str, Runner] = {}
    for peer in peers:
        record = new_record(peer.name, peer.label)
        records.append(record)
        progress(peer.name, "prepare")
        runner = _prepare(peer, task, record)
        if runner is not None:
            progress(peer.name, "check")
            if _check(runner, expected, record):
                runners[peer.name] = runner
        del runner
        gc.collect()
    judge(records, task.dtype)
    if any(record["status"] == "wrong" for record in records):
        casts = {torch.float64, task.dtype} - {torch.float32, torch.int8}
        judge(records, task.dtype, max(_error_in(dtype, build, expected) for dtype in casts))
    _check_again(runners, expected, records, progress)
    return records, runners


def _prepare(peer: Peer, task: Task, record: Record) -> Runner | None:
    """The peer's runner; or None, with status and reason in the record."""
    start = time.perf_counter()
    try:
        runner = peer.prepare(task)
    except Exception as error:  # any failure of a peer is a result, with its reason
        refuse_for(record, error)
        return None
    record["prepare_seconds"] = time.perf_counter() - start
    record["notes"] = runner.notes
    return runner


def _check(runner: Runner, expected: Sequence[Tensor], record: Record) -> bool:
    """Compare the peer's output with eager fp32; False with the reason if it cannot be had."""
    try:
        difference = largest_difference(runner.tensors(runner.call()), expected)
    except Exception as error:  # any failure of a peer is a result, with its reason
        refuse_for(record, error)
        return False
    record["difference"] = difference
    return True


def _error_in(
    dtype: torch.dtype, build: Callable[[], tuple[nn.Module, Inputs]], expected: Sequence[Tensor]
) -> float:
    """How far the float32 output is from that of the model and its inputs cast to another dtype; 0
    where the model does not run in it."""
    model, inputs = build()
    try:
        other = call_model(model.to(dtype), cast_tensors(inputs, dtype))
    except (RuntimeError, TypeError, ValueError):  # its code makes float32 constants, for one
        return 0.0
    error = largest_difference(output_tensors(other), expected)
    return error if math.isfinite(error) else 0.0


def _check_again(
    runners: Mapping[str, Runner],
    expected: Sequence[Tensor],
    records: Sequence[Record],
    progress: Progress,
) -> None:
    """Check every peer once more, now that all are there: one may have changed another."""
    for record in filter(is_measured, records):
        progress(record["peer"], "check again")
        if not _check(runners[record["peer"]], expected, record):
            continue
        if record["difference"] > record["allowed_difference"]:
            text = "right at first, wrong after the other peers were prepared"
            refuse(record, "wrong", f"{text}: relative difference {record['difference']:.2g}")


def _time_together(
    records: Sequence[Record], runners: dict[str, Runner], rounds: int, progress: Progress
) -> None:
    """Interleaved rounds of every peer whose output is right; the rest is let go before."""
    contestants = [record for record in records if is_measured(record)]
    if not contestants:
        return
    calls = {record["peer"]: runners[record["peer"]].call for record in contestants}
    runners.clear()
    gc.collect()
    progress("", "warm-up")
    series = interleave(
        calls, rounds=rounds, on_round=lambda index: progress("", f"round {index}/{rounds}")
    )
    for record in contestants:
        add_times(record, series[record["peer"]], series.get("eager"))


def run_job(progress: Progress, settings: Settings, model: str, dtype: str) -> Result:
    """`run_model` for the worker process."""
    return run_model(CASES[model], dtype, settings, batch=settings.batch, progress=progress)
