"""One optimizer on one set of tensors: torch's steps, oxytorch's in every format, the limit."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from oxytorch.benchmark.contest import Absent, Progress, new_record, no_progress, refuse, refuse_for
from oxytorch.benchmark.limits import BandwidthProbes
from oxytorch.benchmark.optim_cases import (
    CASES,
    FORMATS,
    LEARNING_RATE,
    OPTIMIZERS,
    PEERS,
    Case,
    Entrant,
    entrants,
    own,
    stock_class,
)
from oxytorch.benchmark.results import spread_record
from oxytorch.benchmark.rounds import Call, interleave, paired_ratio, spread

CHECK_SHAPES = [(64, 80), (7,), (5000,), (3, 5, 7, 2)]
CHECK_STEPS = 3
PROBE_BYTES = 512 << 20
CPU = torch.device("cpu")


@dataclass(frozen=True)
class OptimSettings:
    """What is measured of every optimizer.

    Attributes:
        peers: see `optim_cases.PEERS`.
        formats: of oxytorch, see `optim_cases.FORMATS`.
        rounds: interleaved rounds.
        threads: number of threads everybody may use.
        probe_bytes: most bytes that a probe of the bandwidth moves.
    """

    peers: Sequence[str] = tuple(PEERS)
    formats: Sequence[str] = tuple(FORMATS)
    rounds: int = 15
    threads: int = 1
    probe_bytes: int = PROBE_BYTES


def _tensors(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    """Numbers that bfloat16 holds exactly, as small as weights."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator).mul_(0.02).bfloat16().float() for shape in shapes
    ]


def copies(
    tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device = CPU
) -> list[Tensor]:
    """The tensors as parameters of their own."""
    return [tensor.detach().to(device, dtype, copy=True).requires_grad_() for tensor in tensors]


def set_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Gives every parameter its gradient."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _change(optimizer: Optimizer, parameters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """What `CHECK_STEPS` steps add to the parameters, as one vector of float64."""
    before = copies(parameters, torch.float64, parameters[0].device)
    for step in range(CHECK_STEPS):
        gradients = _tensors(CHECK_SHAPES, 1 + step)
        set_gradients(
            parameters, [g.to(p.device, dtype) for p, g in zip(parameters, gradients, strict=True)]
        )
        optimizer.step()
    # What a split parameter holds is half of the truth.
    whole = getattr(optimizer, "master_weight", Tensor.detach)
    after = parameters if dtype == torch.float64 else [whole(p) for p in parameters]
    with torch.no_grad():
        return torch.cat(
            [(new.double() - old).flatten().cpu() for new, old in zip(after, before, strict=True)]
        )


def expected_change(optimizer: str) -> Tensor:
    """The same in float64: by torch's class, or by oxytorch's rule where torch has none."""
    parameters = copies(_tensors(CHECK_SHAPES, 0), torch.float64)
    try:
        make: Any = stock_class(optimizer)
        reference = make(parameters, lr=LEARNING_RATE, foreach=False, **OPTIMIZERS[optimizer])
    except Absent:
        reference = own(optimizer, parameters)
    return _change(reference, parameters, torch.float64)


def check(entrant: Entrant, expected: Tensor, device: torch.device = CPU) -> dict[str, Any]:
    """The entrant's record after three steps on small tensors.

    `difference` is the norm of the difference between what its steps and what float64 steps change,
    divided by the norm of the latter. A wrong one gets no speed; each format has its own limit.
    """
    record: Any = new_record(entrant.name, entrant.label)
    kept = FORMATS[entrant.format]
    allowed = entrant.allowed or kept.allowed
    record.update(format=entrant.format, allowed_difference=allowed)
    try:
        parameters = copies(_tensors(CHECK_SHAPES, 0), kept.parameter_dtype, device)
        change = _change(entrant.make(parameters), parameters, kept.parameter_dtype)
    except Exception as error:  # any failure of a peer is a result, with its reason
        refuse_for(record, error)
        return dict(record)
    difference = float((change - expected).norm() / expected.norm())
    record["difference"] = difference
    # Written so that NaN is refused.
    if not difference <= allowed:
        refuse(record, "wrong", f"change differs by {difference:.2g} > {allowed:.2g} allowed")
    else:
        record["status"] = "measured"
    return dict(record)


def kept_bytes(optimizer: Optimizer, parameters: Sequence[Tensor]) -> int:
    """Bytes of parameters, lower halves and states; the numbers of steps are left out."""
    states = sum(
        value.nbytes
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, Tensor) and key != "step"
    )
    weights = sum(parameter.nbytes for parameter in parameters)
    return states + weights + low_half_bytes(optimizer, parameters)


def low_half_bytes(optimizer: Optimizer, parameters: Sequence[Tensor]) -> int:
    """Bytes of the lower halves of split weights, which oxytorch's optimizers keep."""
    low_half = getattr(optimizer, "low_bits", None)
    lows = [None if low_half is None else low_half(parameter) for parameter in parameters]
    return sum(low.nbytes for low in lows if low is not None)


def _enter(
    entrants_: Sequence[Entrant],
    records: dict[str, dict[str, Any]],
    case: Case,
    progress: Progress,
) -> dict[str, Call]:
    """The steps of all whose record says that they are right, each on parameters of its own."""
    weights, numbers = _tensors(case.shapes(), 0), _tensors(case.shapes(), 1)
    gradients = {torch.float32: numbers, torch.bfloat16: [tensor.bfloat16() for tensor in numbers]}
    elements = sum(tensor.numel() for tensor in weights)
    steps: dict[str, Call] = {}
    for entrant in entrants_:
        record = records[entrant.name]
        if record["status"] != "measured":
            continue
        progress(entrant.name.split(" ")[0], "prepare")
        dtype = FORMATS[entrant.format].parameter_dtype
        parameters = copies(weights, dtype)
        set_gradients(parameters, gradients[dtype])
        optimizer = entrant.make(parameters)
        optimizer.step()
        kept = kept_bytes(optimizer, parameters)
        record["bytes_per_parameter"] = kept / elements
        record["bytes"] = 2 * kept + dtype.itemsize * elements
        steps[entrant.name] = cast(Call, optimizer.step)
    return steps


def _base(steps: Mapping[str, Call]) -> str | None:
    """The peer whose time all others are divided by."""
    order = ("fused", "foreach", "predecessor", "oxytorch")
    return next((peer for peer in order if peer in steps), None)


def run_optimizer(
    name: str, case: Case, settings: OptimSettings, progress: Progress = no_progress
) -> dict[str, Any]:
    """Measure one step of an optimizer on the tensors of a case; the result as JSON.

    A step's least traffic is that of parameters, gradients and states, each read once and all but
    the gradients written once. Its fraction of the limit is the time for that traffic at the
    bandwidth of a copy or a change in place in the same round, whichever is faster, divided by its
    time.
    """
    torch.set_num_threads(settings.threads)
    asked = list(entrants(name, settings.peers, settings.formats))
    expected = expected_change(name)
    records = {}
    for entrant in asked:
        progress(entrant.name.split(" ")[0], "check")
        records[entrant.name] = check(entrant, expected)
    steps = _enter(asked, records, case, progress)
    gc.collect()
    elements = sum(math.prod(shape) for shape in case.shapes())
    probes = BandwidthProbes(min(settings.probe_bytes, 2 * 4 * elements), settings.threads)
    limits = {**probes.read_write(), **probes.update()}
    turns = {**steps, **{f"limit {kind}": limit.call for kind, limit in limits.items()}}
    progress("", f"{case.name} rounds")
    series = interleave(turns, rounds=settings.rounds, warm_up=2)
    probes.close()
    bandwidth = [
        max(limit.work / series[f"limit {kind}"][index] for kind, limit in limits.items())
        for index in range(settings.rounds)
    ]
    base = _base(steps)
    for peer in steps:
        record, seconds = records[peer], series[peer]
        moved = record["bytes"]
        record["rounds"] = seconds
        record["seconds"] = spread_record(spread(seconds))
        record["bandwidth"] = spread_record(spread([moved / value for value in seconds]))
        least = [moved / rate for rate in bandwidth]
        record["fraction_of_limit"] = spread_record(paired_ratio(least, seconds))
        if base is not None:
            record["speedup"] = spread_record(paired_ratio(series[base], seconds))
            record["time_over_base"] = spread_record(paired_ratio(seconds, series[base]))
    return {
        "optimizer": name,
        "case": case.name,
        "title": case.title,
        "tensors": len(case.shapes()),
        "parameters": elements,
        "options": {"lr": LEARNING_RATE, **OPTIMIZERS[name]},
        "threads": settings.threads,
        "base": base,
        "read_write_bandwidth": spread_record(spread(bandwidth)),
        "peers": list(records.values()),
    }


def run_job(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """`run_optimizer` for the worker process: every argument comes as JSON."""
    settings = OptimSettings(
        peers=job["peers"], formats=job["formats"], rounds=job["rounds"], threads=job["threads"]
    )
    return run_optimizer(job["optimizer"], CASES[job["case"]], settings, progress)
