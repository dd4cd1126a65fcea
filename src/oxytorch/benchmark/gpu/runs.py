"""Steps of optimizers on a GPU: time on the device, time on the host, memory that they keep."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from oxytorch.benchmark.core.contest import Progress, no_progress, refuse_for
from oxytorch.benchmark.core.jobs import Settings
from oxytorch.benchmark.core.results import Record, Result, is_measured
from oxytorch.benchmark.core.rounds import Call, paired_ratio, spread
from oxytorch.benchmark.gpu.cases import CASES, DEFAULT_FORMATS
from oxytorch.benchmark.gpu.clocks import Clock
from oxytorch.benchmark.gpu.contestants import entrants
from oxytorch.benchmark.machine.limits import Probe
from oxytorch.benchmark.optim.cases import FORMATS, OPTIMIZERS, Case
from oxytorch.benchmark.optim.contestants import Entrant
from oxytorch.benchmark.optim.runs import (
    add_step_times,
    check,
    copies,
    expected_change,
    first_of,
    kept_bytes,
    numbers,
    result_head,
    set_gradients,
)

PROBE_BYTES = 2 << 30
"""Bytes that the copy moves, half of them read and half written."""
SERIES_SECONDS = 0.05
MOST_STEPS = 20
QUEUE = 1000
"""About how many kernels may wait on a device before the host has to wait."""


def _copy(clock: Clock) -> Probe:
    """The limit: a copy within the device's memory."""
    source = torch.zeros(PROBE_BYTES // 8, device=clock.device)
    target = torch.empty_like(source)
    return Probe(lambda: target.copy_(source), 2 * source.nbytes)


def _measure(
    entrant: Entrant,
    record: Record,
    data: tuple[list[Tensor], list[Tensor]],
    settings: Settings,
    clock: Clock,
) -> None:
    """Adds times and bytes to the record; the optimizer and its tensors are gone afterwards."""
    dtype = FORMATS[entrant.format].parameter_dtype
    parameters = copies(data[0], dtype, clock.device)
    set_gradients(parameters, [gradient.to(dtype) for gradient in data[1]])
    before = clock.allocated()
    clock.synchronize()
    began = time.perf_counter()
    optimizer = entrant.make(parameters)
    optimizer.step()
    clock.synchronize()
    record["first_step_seconds"] = time.perf_counter() - began
    states = _state_bytes(optimizer, parameters, before, clock.allocated())
    elements = sum(parameter.numel() for parameter in parameters)
    record.update(
        state_bytes_per_parameter=states / elements,
        bytes_per_parameter=states / elements + dtype.itemsize,
        bytes=2 * (states + dtype.itemsize * elements) + dtype.itemsize * elements,
    )
    # Some peers start a kernel for each tensor.
    most = min(MOST_STEPS, QUEUE // len(parameters))
    _time(cast(Call, optimizer.step), record, most, settings, clock)


def _time(step: Call, record: Record, most: int, settings: Settings, clock: Clock) -> None:
    """Adds times of the step, on the device in series of at most `most`, next to a copy's."""
    guess = min(clock.on_host(step) for _ in range(3))
    clock.synchronize()
    alone = clock.on_device(step, 1, guess)
    count = max(1, min(most, int(SERIES_SECONDS / max(alone, 1e-6))))
    copy = _copy(clock)
    clock.on_device(copy.call, 3, 1e-4)
    bandwidth, seconds, host = [], [], []
    for _ in range(settings.rounds):
        bandwidth.append(copy.work / clock.on_device(copy.call, 3, 1e-4))
        seconds.append(clock.on_device(step, count, guess))
        host.append(clock.on_host(step))
    clock.synchronize()
    add_step_times(record, seconds, bandwidth, None)
    record.update(host_seconds=spread(host), copy_bandwidth=spread(bandwidth))


def _state_bytes(
    optimizer: Optimizer, parameters: Sequence[Tensor], before: int | None, after: int | None
) -> int:
    """What the optimizer keeps beside the parameters: states, lower halves, tables."""
    if before is not None and after is not None:
        return after - before
    return kept_bytes(optimizer, parameters) - sum(parameter.nbytes for parameter in parameters)


def run_case(
    case: Case,
    settings: Settings,
    clock: Clock,
    progress: Progress = no_progress,
) -> Iterator[Result]:
    """Measure steps of all optimizers on the tensors of a case; a result for each, as JSON.

    A step's least traffic is that of parameters, gradients and states, each read once and all but
    the gradients written once. Its fraction of the limit is the time for that traffic at the
    bandwidth of a copy in the same round, divided by its time on the device.
    """
    data = numbers(case.shapes(), 0, clock.device), numbers(case.shapes(), 1, clock.device)
    for name in settings.only or OPTIMIZERS:
        expected = expected_change(name)
        records = []
        for entrant in entrants(name, settings.peers, settings.formats or DEFAULT_FORMATS):
            peer = entrant.name.split(" ")[0]
            progress(peer, f"{case.name} {name} {entrant.format}")
            record = check(entrant, expected, clock.device)
            if is_measured(record):
                try:
                    _measure(entrant, record, data, settings, clock)
                except Exception as error:  # any failure of a peer is a result, with its reason
                    refuse_for(record, error)
            gc.collect()
            records.append(record)
        yield _result(name, case, records, clock)


def _result(name: str, case: Case, records: list[Record], clock: Clock) -> Result:
    measured = {record["peer"]: record for record in records if is_measured(record)}
    base = first_of(("fused", "foreach", "optimi"), measured)
    for record in measured.values():
        if base is not None:
            record["speedup"] = paired_ratio(measured[base]["rounds"], record["rounds"])
    rates = [record["copy_bandwidth"]["median"] for record in measured.values()]
    head = result_head(name, case, base, rates)
    return {**head, "device": clock.device_name(), "peers": records}


def run_job(progress: Progress, settings: Settings, case: str) -> Iterator[Result]:
    """`run_case` for the worker process."""
    return run_case(CASES[case], settings, Clock(), progress)
