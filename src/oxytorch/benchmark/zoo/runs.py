"""Whole models of many kinds beside stock PyTorch, with the defaults of `optimize`: who loses?"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from oxytorch.benchmark.core.contest import Progress
from oxytorch.benchmark.core.rounds import Spread, geometric_mean, paired_ratio
from oxytorch.benchmark.models.cases import call_model
from oxytorch.benchmark.models.contestants import Peer, prepare_eager, prepare_eager_cast
from oxytorch.benchmark.models.runs import run_model
from oxytorch.benchmark.models.task import Runner, Task
from oxytorch.benchmark.report.tables import (
    Result,
    Table,
    fastest_other,
    is_measured,
    milliseconds,
    peer_record,
    reasons,
)
from oxytorch.benchmark.zoo.cases import ZOO

LOSS = 0.97
"""Speed over that of the fastest stock way below which a model counts as lost."""


def prepare_float32(task: Task) -> Runner:
    """The model as it is, whatever dtype is asked for: the way without any change."""
    return Runner(lambda: call_model(task.model, task.inputs))


def prepare_optimized(task: Task, with_sample: bool) -> Runner:
    """`oxytorch.optimize` with its defaults, with or without `sample_input`."""
    oxytorch = importlib.import_module("oxytorch")
    dtype = None if task.dtype == torch.float32 else task.dtype
    given = {"sample_input": task.inputs} if with_sample else {}
    start = time.perf_counter()
    model = oxytorch.optimize(task.model, dtype=dtype, **given)
    notes: dict[str, object] = {"optimize_seconds": time.perf_counter() - start}
    return Runner(lambda: call_model(model, task.inputs), notes=notes)


CONTESTANTS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
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
}
"""Stock ways and ours by name. In bfloat16 `eager` runs under autocast."""

OURS = ("oxytorch", "oxytorch_sample")


def contestants(dtype: str) -> list[str]:
    """Who takes part in a dtype: in float32 the ways of stock PyTorch are one and the same."""
    return [name for name in CONTESTANTS if dtype != "float32" or name in ("eager", *OURS)]


def run_job(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Measure one model for the worker process: every argument comes as JSON."""
    result = run_model(
        ZOO[job["model"]],
        getattr(torch, job["dtype"]),
        peers=job["peers"],
        batch=job["batch"],
        rounds=job["rounds"],
        threads=job["threads"],
        progress=progress,
        contestants=CONTESTANTS,
        eager_may_fail=True,
    )
    result["level"] = str(importlib.import_module("oxytorch.isa").active())
    return result


def speed_over_stock(result: Result, peer: str) -> Spread | None:
    """How many times faster a way of ours is than the fastest stock one, round by round."""
    ours, stock = peer_record(result, peer), fastest_other(result)
    if ours is None or stock is None or not is_measured(ours):
        return None
    return paired_ratio(stock["rounds"], ours["rounds"])


def lost(result: Result) -> list[str]:
    """A line for each way of ours that is slower than stock, or that gave no right answer."""
    lines = []
    for peer in OURS:
        record, speed = peer_record(result, peer), speed_over_stock(result, peer)
        if record is None:
            continue
        name = f"{result['model']} {result['dtype']} batch {result['batch']}, {record['label']}"
        if speed is None:
            lines.append(f"{name}: {record['status']}: {record.get('reason', '')}")
        elif speed.median < LOSS:
            stock = fastest_other(result)
            assert stock is not None
            lines.append(
                f"{name}: {speed.median:.2f}x ({speed.low:.2f} to {speed.high:.2f}) of "
                f"{stock['label']}: {milliseconds(record['seconds']['median'])}, "
                f"{milliseconds(stock['seconds']['median'])}"
            )
    return lines


def zoo_tables(results: Sequence[Result]) -> list[Table]:
    """A table for each dtype, then every loss."""
    dtypes = dict.fromkeys(str(result["dtype"]) for result in results)
    tables = [_dtype_table([r for r in results if r["dtype"] == dtype], dtype) for dtype in dtypes]
    losses = Table(f"Slower than {LOSS} of the fastest stock way, or not right", ["what"])
    losses.rows = [[line] for result in results for line in lost(result)] or [["none"]]
    return [*tables, losses]


def _dtype_table(results: Sequence[Result], dtype: str) -> Table:
    stock = [name for name in contestants(dtype) if name not in OURS]
    table = Table(
        f"Zoo, {dtype}",
        [
            "model",
            "batch",
            *(CONTESTANTS[name].label for name in stock),
            "oxytorch",
            "over stock",
            "oxytorch, sample_input",
            "over stock",
        ],
    )
    means: dict[str, list[float]] = {peer: [] for peer in OURS}
    for result in results:
        row = [result["title"], str(result["batch"])]
        row += [_time_cell(peer_record(result, name)) for name in stock]
        for peer in OURS:
            speed = speed_over_stock(result, peer)
            row.append(_time_cell(peer_record(result, peer)))
            row.append("-" if speed is None else f"{speed.median:.2f}x")
            if speed is not None:
                means[peer].append(speed.median)
        table.rows.append(row)
    cells = [cell for peer in OURS for cell in ("", _mean(means[peer], len(results)))]
    table.rows.append(["geometric mean", "", *[""] * len(stock), *cells])
    table.notes = reasons(results, lambda result: f"{result['model']} batch {result['batch']}")
    return table


def _time_cell(record: Result | None) -> str:
    if record is None:
        return "-"
    if not is_measured(record):
        return str(record["status"])
    return milliseconds(record["seconds"]["median"])


def _mean(values: Sequence[float], count: int) -> str:
    if not values:
        return "-"
    text = f"{geometric_mean(values):.2f}x"
    return text if len(values) == count else f"{text} ({len(values)} of {count})"
