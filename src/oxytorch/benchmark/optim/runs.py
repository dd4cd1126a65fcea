"""One optimizer on one set of tensors: torch's steps, oxytorch's in every format, the limit."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from oxytorch.benchmark.core.contest import (
    Absent,
    Progress,
    add_times,
    new_record,
    no_progress,
    refuse,
    refuse_for,
)
from oxytorch.benchmark.core.jobs import Settings
from oxytorch.benchmark.core.results import Record, Result, is_measured
from oxytorch.benchmark.core.rounds import Call, interleave, paired_ratio, spread
from oxytorch.benchmark.machine.limits import BandwidthProbes, best_rates
from oxytorch.benchmark.optim.cases import CASES, FORMATS, LEARNING_RATE, OPTIMIZERS, Case, Shapes
from oxytorch.benchmark.optim.contestants import Entrant, entrants, own
from oxytorch.benchmark.peers.optimizers import stock_class

CHECK_SHAPES: Shapes = [(64, 80), (7,), (5000,), (3, 5, 7, 2)]
CHECK_STEPS = 3
CPU = torch.device("cpu")


def numbers(shapes: Shapes, seed: int, device: torch.device = CPU) -> list[Tensor]:
    """Tensors of numbers that bfloat16 holds exactly, as small as weights."""
    generator = torch.Generator(device).manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, device=device).mul_(0.02).bfloat16().float()
        for shape in shapes
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
        gradients = numbers(CHECK_SHAPES, 1 + step)
        set_gradients(parameters, [gradient.to(before[0].device, dtype) for gradient in gradients])
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
    parameters = copies(numbers(CHECK_SHAPES, 0), torch.float64)
    try:
        make: Any = stock_class(optimizer)
        reference = make(parameters, lr=LEARNING_RATE, foreach=False, **OPTIMIZERS[optimizer])
    except Absent:
        reference = own(optimizer, parameters)
    return _change(reference, parameters, torch.float64)


def check(entrant: Entrant, expected: Tensor, device: torch.device = CPU) -> Record:
    """The entrant's record after three steps on small tensors.

    `difference` is the norm of the difference between what its steps and what float64 steps change,
    divided by the norm of the latter. A wrong one gets no speed; each format has its own limit.
    """
    kept = FORMATS[entrant.format]
    allowed = entrant.allowed or kept.allowed
    record = new_record(entrant.name, entrant.label)
    record.update(format=entrant.format, allowed_difference=allowed)
    try:
        parameters = copies(numbers(CHECK_SHAPES, 0), kept.parameter_dtype, device)
        change = _change(entrant.make(parameters), parameters, kept.parameter_dtype)
    except Exception as error:  # any failure of a peer is a result, with its reason
        refuse_for(record, error)
        return record
    difference = float((change - expected).norm() / expected.norm())
    record["difference"] = difference
    # Written so that NaN is refused.
    if not difference <= allowed:
        refuse(record, "wrong", f"change differs by {difference:.2g} > {allowed:.2g} allowed")
    else:
        record["status"] = "measured"
    return record


def kept_bytes(optimizer: Optimizer, parameters: Sequence[Tensor]) -> int:
    """Bytes of parameters, lower halves and states; the numbers of steps are left out."""
    states = sum(
        value.nbytes
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, Tensor) and key != "step"
    )
    weights = sum(parameter.nbytes for parameter in parameters)
    return states + weights + bytes_of_low_bits(optimizer, parameters)


def bytes_of_low_bits(optimizer: Optimizer, parameters: Sequence[Tensor]) -> int:
    """Bytes of the lower halves of split weights, which oxytorch's optimizers keep."""
    low_bits = getattr(optimizer, "low_bits", None)
    lows = [None if low_bits is None else low_bits(parameter) for parameter in parameters]
    return sum(low.nbytes for low in lows if low is not None)


def _enter(
    asked: Sequence[Entrant], records: Mapping[str, Record], case: Case, progress: Progress
) -> dict[str, Call]:
    """The steps of all whose record says that they are right, each on parameters of its own."""
    weights, slopes = numbers(case.shapes(), 0), numbers(case.shapes(), 1)
    gradients = {torch.float32: slopes, torch.bfloat16: [slope.bfloat16() for slope in slopes]}
    steps: dict[str, Call] = {}
    for entrant in asked:
        record = records[entrant.name]
        if not is_measured(record):
            continue
        progress(entrant.name.split(" ")[0], "prepare")
        dtype = FORMATS[entrant.format].parameter_dtype
        parameters = copies(weights, dtype)
        set_gradients(parameters, gradients[dtype])
        optimizer = entrant.make(parameters)
        optimizer.step()
        kept = kept_bytes(optimizer, parameters)
        record["bytes_per_parameter"] = kept / case.elements()
        record["bytes"] = 2 * kept + dtype.itemsize * case.elements()
        steps[entrant.name] = cast(Call, optimizer.step)
    return steps


def run_optimizer(
    name: str,
    case: Case,
    settings: Settings,
    progress: Progress = no_progress,
    probe_bytes: int = 512 << 20,
) -> Result:
    """Measure one step of an optimizer on the tensors of a case; the result as JSON.

    A step's least traffic is that of parameters, gradients and states, each read once and all but
    the gradients written once. Its fraction of the limit is the time for that traffic at the
    bandwidth of a copy or a change in place in the same round, whichever is faster, divided by its
    time.
    probe_bytes: most bytes that a probe of the bandwidth moves.
    """
    asked = list(entrants(name, settings.peers, settings.formats or [*FORMATS]))
    expected = expected_change(name)
    records = {}
    for entrant in asked:
        progress(entrant.name.split(" ")[0], "check")
        records[entrant.name] = check(entrant, expected)
    steps = _enter(asked, records, case, progress)
    gc.collect()
    probes = BandwidthProbes(min(probe_bytes, 2 * 4 * case.elements()), settings.threads)
    limits = {**probes.read_write(), **probes.update()}
    turns = {**steps, **{kind: limit.call for kind, limit in limits.items()}}
    progress("", f"{case.name} rounds")
    series = interleave(turns, rounds=settings.rounds, warm_up=2)
    probes.close()
    bandwidth = best_rates(limits, series)
    base = first_of(("fused", "foreach", "predecessor", "oxytorch"), steps)
    for peer in steps:
        add_step_times(records[peer], series[peer], bandwidth, series[base] if base else None)
    head = result_head(name, case, base, bandwidth)
    return {**head, "threads": settings.threads, "peers": list(records.values())}


def first_of(order: Sequence[str], present: Mapping[str, object]) -> str | None:
    """The first peer of an order that is there: the one whose time all others are divided by."""
    return next((peer for peer in order if peer in present), None)


def add_step_times(
    record: Record, seconds: list[float], bandwidth: Sequence[float], base: Sequence[float] | None
) -> None:
    """Note the times of a contestant whose `bytes` are known, next to the limit in each round."""
    moved = record["bytes"]
    add_times(record, seconds, base)
    record["bandwidth"] = spread([moved / value for value in seconds])
    record["fraction_of_limit"] = paired_ratio([moved / rate for rate in bandwidth], seconds)
    if base is not None:
        record["time_over_base"] = paired_ratio(seconds, base)


def result_head(optimizer: str, case: Case, base: str | None, bandwidth: Sequence[float]) -> Result:
    """What a result says of its optimizer and its tensors."""
    return {
        "optimizer": optimizer,
        "case": case.name,
        "title": case.title,
        "tensors": len(case.shapes()),
        "parameters": case.elements(),
        "options": {"lr": LEARNING_RATE, **OPTIMIZERS[optimizer]},
        "base": base,
        "read_write_bandwidth": spread(bandwidth) if bandwidth else None,
    }


def run_job(progress: Progress, settings: Settings, optimizer: str, case: str) -> Result:
    """`run_optimizer` for the worker process."""
    return run_optimizer(optimizer, CASES[case], settings, progress)
