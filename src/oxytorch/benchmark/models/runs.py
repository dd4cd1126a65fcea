"""One model in one dtype: build the peers, check their answers, time them in turns."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from oxytorch.benchmark.core.contest import (
    Progress,
    judge,
    largest_difference,
    new_record,
    no_progress,
    refuse,
    refuse_for,
)
from oxytorch.benchmark.core.results import PeerRecord, measured, spread_record
from oxytorch.benchmark.core.rounds import interleave, paired_ratio, spread
from oxytorch.benchmark.models.cases import CASES, ModelCase, call_model, output_tensors
from oxytorch.benchmark.models.contestants import PEERS, Peer
from oxytorch.benchmark.models.task import Runner, Task


def _prepare(peer: Peer, task: Task, record: PeerRecord) -> Runner | None:
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


def _check(runner: Runner, expected: Sequence[Tensor], record: PeerRecord) -> bool:
    """Compare the peer's answer with eager fp32; False with the reason if it cannot be had."""
    try:
        difference = largest_difference(runner.tensors(runner.call()), expected)
    except Exception as error:  # any failure of a peer is a result, with its reason
        refuse_for(record, error)
        return False
    record["difference"] = difference
    return True


def _error_of_float32(model: Any, inputs: Any, expected: Sequence[Tensor]) -> float:
    """How far the float32 answer is from that in float64; 0 where the model does not run in it."""

    def doubled(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.double() if is_float else value

    try:
        exact = call_model(copy.deepcopy(model).double(), pytree.tree_map(doubled, inputs))
    except (RuntimeError, TypeError, ValueError):  # its code makes float32 constants, for one
        return 0.0
    return largest_difference(expected, output_tensors(exact))


def _check_again(
    runners: dict[str, Runner],
    expected: Sequence[Tensor],
    records: Sequence[PeerRecord],
    progress: Progress,
) -> None:
    """Check every peer once more, now that all are there: one may have changed another."""
    for record in records:
        if not measured(record):
            continue
        progress(record["peer"], "check again")
        if not _check(runners[record["peer"]], expected, record):
            continue
        if record["difference"] > record["allowed_difference"]:
            text = "right at first, wrong after the other peers were prepared"
            refuse(record, "wrong", f"{text}: relative difference {record['difference']:.2g}")


def _time_alone(eager: Peer, task: Task, rounds: int, may_fail: bool) -> float | None:
    """Seconds of the eager model before any other peer is loaded in this process."""
    try:
        runner = eager.prepare(task)
        runner.call()
    except Exception:  # which is noted as its result when its turn comes
        if not may_fail:
            raise
        return None
    return spread(interleave({"eager": runner.call}, rounds=rounds)["eager"]).median


def run_model(
    case: ModelCase,
    dtype: torch.dtype,
    *,
    peers: Sequence[str],
    batch: int,
    rounds: int,
    threads: int,
    progress: Progress = no_progress,
    contestants: Mapping[str, Peer] = PEERS,
    eager_may_fail: bool = False,
) -> dict[str, Any]:
    """Measure one model in one dtype with the named peers; the result as a JSON dictionary.

    `eager` always takes part: it gives the right answer and is the base of the ratios.
    contestants: the peers by name. eager_may_fail: whether its failure is a result like the others'
    (autocast does not run every model); then there are no ratios to it.
    """
    torch.set_num_threads(threads)
    names = ["eager", *(name for name in peers if name != "eager")]
    with torch.no_grad():
        progress("eager", "build")
        model, inputs = case.build(batch)
        expected = [tensor.clone() for tensor in output_tensors(call_model(model, inputs))]
        task = Task(model, inputs, dtype, threads)
        progress("eager", "alone")
        alone = _time_alone(contestants["eager"], task, max(1, rounds // 2), eager_may_fail)
        records: list[PeerRecord] = []
        runners: dict[str, Runner] = {}
        for name in names:
            record = new_record(name, contestants[name].label)
            records.append(record)
            progress(name, "prepare")
            runner = _prepare(contestants[name], task, record)
            if runner is not None:
                progress(name, "check")
                if _check(runner, expected, record):
                    runners[name] = runner
            del runner
            gc.collect()
        judge(records, dtype)
        if any(record["status"] == "wrong" for record in records):
            judge(records, dtype, _error_of_float32(model, inputs, expected))
        _check_again(runners, expected, records, progress)
        eager = records[0]
        if not measured(eager) and not eager_may_fail:
            raise RuntimeError(f"{case.name}: eager is {eager['status']}: {eager['reason']}")
        _time_together(records, runners, rounds, progress)
    return {
        "model": case.name,
        "title": case.title,
        "dtype": str(dtype).removeprefix("torch."),
        "batch": batch,
        "threads": threads,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "eager_alone_seconds": alone,
        "eager_interleaved_over_alone": (
            eager["seconds"]["median"] / alone if alone and measured(eager) else None
        ),
        "peers": records,
    }


def _time_together(
    records: Sequence[PeerRecord],
    runners: dict[str, Runner],
    rounds: int,
    progress: Progress,
) -> None:
    """Interleaved rounds of every peer whose answer is right; the rest is let go before."""
    contestants = [record for record in records if measured(record)]
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
        values = series[record["peer"]]
        record["rounds"] = values
        record["seconds"] = spread_record(spread(values))
        if "eager" in series:
            record["speedup"] = spread_record(paired_ratio(series["eager"], values))


def run_job(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """`run_model` for the worker process: every argument comes as JSON."""
    case = CASES[job["model"]]
    return run_model(
        case,
        getattr(torch, job["dtype"]),
        peers=job["peers"],
        batch=job["batch"],
        rounds=job["rounds"],
        threads=job["threads"],
        progress=progress,
    )
