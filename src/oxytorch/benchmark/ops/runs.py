"""One op in one dtype: oxytorch at one or more levels, plain PyTorch, compiled PyTorch, limits."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from oxytorch import isa, ops
from oxytorch.benchmark.core.contest import (
    Progress,
    add_times,
    judge,
    largest_difference,
    new_record,
    no_progress,
    refuse_for,
)
from oxytorch.benchmark.core.jobs import Settings
from oxytorch.benchmark.core.results import Record, Result, is_measured
from oxytorch.benchmark.core.rounds import Call, Context, interleave, paired_ratio, spread
from oxytorch.benchmark.machine.limits import (
    BandwidthProbes,
    best_rates,
    matrix_product,
    measured_rates,
)
from oxytorch.benchmark.models.cases import cast_tensors, output_tensors
from oxytorch.ops import Op, Sample

SIZES = ("cache", "memory")
PEERS = {"eager": "torch eager", "compile": "torch.compile", "oxytorch": "oxytorch"}

BURST_SECONDS = {"cache": 0.005, "memory": 0.05}


@dataclass(frozen=True)
class Contestant:
    """A function with the op's arguments, and the context that it runs in."""

    function: Callable[..., object]
    context: Context = nullcontext

    def call(self, sample: Sample) -> Call:
        """The call that is measured."""
        return lambda: self.function(*sample.args, **sample.kwargs)


def _contestants(op: Op, settings: Settings) -> dict[str, Contestant]:
    """Every contestant by name, `eager` first; oxytorch once per level asked for."""
    contestants = {"eager": Contestant(op.reference)}
    if "compile" in settings.peers:
        compiled = torch.compile(op.reference, dynamic=False)
        contestants["compile"] = Contestant(compiled)
    if "oxytorch" not in settings.peers:
        return contestants
    if not settings.levels:
        contestants["oxytorch"] = Contestant(op.function)
        return contestants
    for level in settings.levels:
        context = functools.partial(isa.use, level)
        contestants[f"oxytorch {level}"] = Contestant(op.function, context)
    return contestants


def _answers(op: Op, function: Callable[..., object], sample: Sample) -> list[Tensor]:
    """What a call computes: its results, and copies of the arguments that it writes into."""
    named = op.arguments(*sample.args, **sample.kwargs)
    own = {name: pytree.tree_map(_copied, named[name]) for name in op.writes}
    return output_tensors([function(**{**named, **own}), *own.values()])


def _copied(part: object) -> object:
    return part.clone() if isinstance(part, Tensor) else part


def _check(
    op: Op,
    name: str,
    contestant: Contestant,
    sample: Sample,
    expected: Sequence[Tensor],
    progress: Progress,
) -> Record:
    """The contestant's record, with the difference of its output or the reason for none."""
    record = new_record(name, PEERS.get(name, name))
    progress(name.split(" ")[0], "check")
    start = time.perf_counter()
    try:
        with contestant.context():
            outputs = _answers(op, contestant.function, sample)
    except Exception as error:  # any failure of a peer is a result, with its reason
        refuse_for(record, error)
        return record
    record["prepare_seconds"] = time.perf_counter() - start
    record["difference"] = largest_difference(outputs, expected)
    return record


@torch.no_grad()
def run_sample(
    op: Op,
    sample: Sample,
    dtype: torch.dtype,
    size: str,
    settings: Settings,
    product_rate: float,
    progress: Progress = no_progress,
) -> Result:
    """Measure one call of an op; the result as a JSON dictionary.

    The fraction of the limit is the least possible time over the measured one. The least time is
    that of the op's traffic at the bandwidth of the same round, or that of its arithmetic at the
    speed of a matrix product (`product_rate`, operations per second), whichever is longer. It is
    given for samples of size "memory".
    """
    cost = op.cost(*sample.args, **sample.kwargs)
    contestants = _contestants(op, settings)
    records = _checked(op, sample, dtype, contestants, progress)
    turns = {name: contestants[name] for name, record in records.items() if is_measured(record)}
    progress("", f"{size} rounds")
    series, bandwidth = _time_together(turns, sample, size, cost.bytes, settings)
    for name in turns:
        record = records[name]
        add_times(record, series[name], series["eager"])
        if bandwidth:
            arithmetic = cost.operations / product_rate
            least = [max(cost.bytes / rate, arithmetic) for rate in bandwidth]
            record["fraction_of_limit"] = paired_ratio(least, series[name])
    return {
        "op": op.name,
        "dtype": str(dtype).removeprefix("torch."),
        "size": size,
        "sample": sample.name,
        "bytes": cost.bytes,
        "operations": cost.operations,
        "threads": settings.threads,
        "read_write_bandwidth": spread(bandwidth) if bandwidth else None,
        "product_rate": product_rate,
        "peers": list(records.values()),
    }


def _checked(
    op: Op,
    sample: Sample,
    dtype: torch.dtype,
    contestants: Mapping[str, Contestant],
    progress: Progress,
) -> dict[str, Record]:
    """A record of each, compared with the reference in float32."""
    args, kwargs = cast_tensors((sample.args, sample.kwargs), torch.float32)
    expected = _answers(op, op.reference, Sample(sample.name, args, kwargs))
    records = {
        name: _check(op, name, contestant, sample, expected, progress)
        for name, contestant in contestants.items()
    }
    del expected, args, kwargs
    gc.collect()
    judge(list(records.values()), dtype)
    return records


def _time_together(
    turns: Mapping[str, Contestant], sample: Sample, size: str, traffic: int, settings: Settings
) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of each in every round; beyond the caches, the bandwidth in that round too."""
    probes = BandwidthProbes(traffic, settings.threads)
    limits = probes.read_write() if size == "memory" else {}
    calls = {name: turn.call(sample) for name, turn in turns.items()}
    calls |= {name: probe.call for name, probe in limits.items()}
    series = interleave(
        calls,
        contexts={name: turn.context for name, turn in turns.items()},
        rounds=settings.rounds,
        burst_seconds=BURST_SECONDS[size],
    )
    probes.close()
    return series, best_rates(limits, series)


def run_op(
    op: Op,
    dtype: torch.dtype,
    settings: Settings,
    progress: Progress = no_progress,
    matrix_size: int = 1024,
) -> Iterator[Result]:
    """Measure an op in one dtype: a result for every sample of its registry entry.

    settings: `peers` besides `eager`, which always takes part; `sizes` and `levels`.
    matrix_size: side of the matrices whose product is the limit of arithmetic.
    """
    product = {"product": matrix_product(dtype, matrix_size)}
    product_rate = max(measured_rates(product, rounds=3))
    for size in settings.sizes:
        for sample in op.samples(dtype, size):
            yield run_sample(op, sample, dtype, size, settings, product_rate, progress)
            gc.collect()


def run_job(progress: Progress, settings: Settings, op: str, dtype: str) -> Iterator[Result]:
    """`run_op` for the worker process."""
    return run_op(ops.registry()[op], getattr(torch, dtype), settings, progress)
