"""One op in one dtype: oxytorch at one or more levels, plain PyTorch, compiled PyTorch, limits."""

from __future__ import annotations

import functools
import gc
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oxytorch.benchmark.core.contest import (
    Progress,
    judge,
    largest_difference,
    new_record,
    no_progress,
    refuse_for,
)
from oxytorch.benchmark.core.results import PeerRecord, measured, spread_record
from oxytorch.benchmark.core.rounds import Call, Context, interleave, paired_ratio, spread
from oxytorch.benchmark.machine.limits import BandwidthProbes, best_rates, matrix_product
from oxytorch.benchmark.models.cases import output_tensors

SIZES = ("cache", "memory")
PEERS = {"eager": "torch eager", "compile": "torch.compile", "oxytorch": "oxytorch"}

BURST_SECONDS = {"cache": 0.005, "memory": 0.05}


@dataclass(frozen=True)
class OpSettings:
    """What is measured of every op.

    Attributes:
        sizes: of the samples, see `SIZES`.
        peers: besides `eager`, which always takes part: `compile`, `oxytorch`.
        levels: ISA levels at which oxytorch runs; none means the active one.
        rounds: interleaved rounds.
        threads: number of threads everybody may use.
        matrix_size: side of the matrices whose product is the limit of arithmetic.
    """

    sizes: Sequence[str] = SIZES
    peers: Sequence[str] = tuple(PEERS)
    levels: Sequence[str] = ()
    rounds: int = 15
    threads: int = 1
    matrix_size: int = 1024


@dataclass(frozen=True)
class Contestant:
    """A call, and the context that it runs in."""

    call: Call
    context: Context = nullcontext


def map_tensors(value: object, function: Callable[[Tensor], Tensor]) -> Any:
    """The value with `function` applied to every tensor in it, through containers."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(part, function) for part in value)
    if isinstance(value, dict):
        return {key: map_tensors(part, function) for key, part in value.items()}
    return value


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _contestants(op: Any, sample: Any, settings: OpSettings) -> dict[str, Contestant]:
    """Every contestant by name, `eager` first; oxytorch once per level asked for."""

    def call_of(function: Callable[..., object]) -> Call:
        return lambda: function(*sample.args, **sample.kwargs)

    contestants = {"eager": Contestant(call_of(op.reference))}
    if "compile" in settings.peers:
        compiled = torch.compile(op.reference, dynamic=False)
        contestants["compile"] = Contestant(call_of(compiled))
    if "oxytorch" not in settings.peers:
        return contestants
    if not settings.levels:
        contestants["oxytorch"] = Contestant(call_of(op.function))
        return contestants
    isa = importlib.import_module("oxytorch.isa")
    for level in settings.levels:
        context = functools.partial(isa.use, level)
        contestants[f"oxytorch {level}"] = Contestant(call_of(op.function), context)
    return contestants


def _check(
    name: str, contestant: Contestant, expected: Sequence[Tensor], progress: Progress
) -> PeerRecord:
    """The contestant's record, with the difference of its answer or the reason for none."""
    record = new_record(name, PEERS.get(name, name))
    progress(name.split(" ")[0], "check")
    start = time.perf_counter()
    try:
        with contestant.context():
            outputs = output_tensors(contestant.call())
    except Exception as error:  # any failure of a peer is a result, with its reason
        refuse_for(record, error)
        return record
    record["prepare_seconds"] = time.perf_counter() - start
    record["difference"] = largest_difference(outputs, expected)
    return record


@torch.no_grad()
def run_sample(
    op: Any,
    sample: Any,
    dtype: torch.dtype,
    size: str,
    settings: OpSettings,
    product_rate: float,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Measure one call of an op; the result as a JSON dictionary.

    The fraction of the limit is the least possible time over the measured one. The least time is
    that of the op's traffic at the bandwidth of the same round, or that of its arithmetic at the
    speed of a matrix product (`product_rate`, operations per second), whichever is longer. It is
    given for samples of size "memory".
    """
    cost = op.cost(*sample.args, **sample.kwargs)
    contestants = _contestants(op, sample, settings)
    expected = output_tensors(
        op.reference(
            *map_tensors(sample.args, _in_float32), **map_tensors(sample.kwargs, _in_float32)
        )
    )
    records = {
        name: _check(name, contestant, expected, progress)
        for name, contestant in contestants.items()
    }
    del expected
    gc.collect()
    judge(list(records.values()), dtype)
    turns = {name: contestants[name] for name in records if measured(records[name])}
    probes = BandwidthProbes(cost.bytes, settings.threads)
    limits = probes.read_write() if size == "memory" else {}
    for name, limit in limits.items():
        turns[f"limit {name}"] = Contestant(limit.call)
    progress("", f"{size} rounds")
    series = interleave(
        {name: turn.call for name, turn in turns.items()},
        contexts={name: turn.context for name, turn in turns.items()},
        rounds=settings.rounds,
        burst_seconds=BURST_SECONDS[size],
    )
    probes.close()
    bandwidth = [
        max(limit.work / series[f"limit {name}"][index] for name, limit in limits.items())
        for index in range(settings.rounds if limits else 0)
    ]
    for name in contestants:
        record = records[name]
        if not measured(record):
            continue
        record["rounds"] = series[name]
        record["seconds"] = spread_record(spread(series[name]))
        record["speedup"] = spread_record(paired_ratio(series["eager"], series[name]))
        if bandwidth:
            arithmetic = cost.operations / product_rate
            least = [max(cost.bytes / rate, arithmetic) for rate in bandwidth]
            record["fraction_of_limit"] = spread_record(paired_ratio(least, series[name]))
    return {
        "op": op.name,
        "dtype": str(dtype).removeprefix("torch."),
        "size": size,
        "sample": sample.name,
        "bytes": cost.bytes,
        "operations": cost.operations,
        "threads": settings.threads,
        "read_write_bandwidth": spread_record(spread(bandwidth)) if bandwidth else None,
        "product_rate": product_rate,
        "peers": list(records.values()),
    }


def run_op(
    op: Any, dtype: torch.dtype, settings: OpSettings, progress: Progress = no_progress
) -> Iterator[dict[str, Any]]:
    """Measure an op in one dtype: a result for every sample of its registry entry."""
    torch.set_num_threads(settings.threads)
    product = {"product": matrix_product(dtype, settings.matrix_size)}
    product_rate = max(best_rates(product, rounds=3))
    for size in settings.sizes:
        for sample in op.samples(dtype, size):
            yield run_sample(op, sample, dtype, size, settings, product_rate, progress)
            gc.collect()


def run_job(job: dict[str, Any], progress: Progress) -> Iterator[dict[str, Any]]:
    """`run_op` for the worker process: every argument comes as JSON."""
    ops = importlib.import_module("oxytorch.ops")
    settings = OpSettings(
        sizes=job["sizes"],
        peers=job["peers"],
        levels=job["levels"],
        rounds=job["rounds"],
        threads=job["threads"],
    )
    return run_op(ops.registry()[job["op"]], getattr(torch, job["dtype"]), settings, progress)
