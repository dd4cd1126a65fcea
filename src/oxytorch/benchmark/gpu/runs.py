"""Steps of optimizers on a GPU: time on the device, time on the host, memory that they keep."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from oxytorch.benchmark.core.contest import Progress, no_progress, refuse_for
from oxytorch.benchmark.core.results import spread_record
from oxytorch.benchmark.core.rounds import Call, paired_ratio, spread
from oxytorch.benchmark.gpu.cases import CASES, DEFAULT_FORMATS, PEERS, entrants
from oxytorch.benchmark.optim.cases import FORMATS, LEARNING_RATE, OPTIMIZERS, Case, Entrant
from oxytorch.benchmark.optim.runs import (
    check,
    copies,
    expected_change,
    kept_bytes,
    set_gradients,
)

PROBE_BYTES = 2 << 30
SERIES_SECONDS = 0.05
MOST_STEPS = 20
QUEUE = 1000
"""About how many kernels may wait on a device before the host has to wait."""


@dataclass(frozen=True)
class GpuOptimSettings:
    """What is measured of every optimizer.

    Attributes:
        optimizers: names of the classes.
        peers: see `gpu_optim_cases.PEERS`.
        formats: of oxytorch, see `optim_cases.FORMATS`.
        rounds: rounds of a copy, a series of steps, and a step on an idle device.
        probe_bytes: bytes that the copy moves, half of them read and half written.
    """

    optimizers: Sequence[str] = tuple(OPTIMIZERS)
    peers: Sequence[str] = tuple(PEERS)
    formats: Sequence[str] = DEFAULT_FORMATS
    rounds: int = 10
    probe_bytes: int = PROBE_BYTES


class Clock(Protocol):
    """How a device's time is told."""

    device: torch.device

    def synchronize(self) -> None:
        """Waits until the device has done everything."""

    def on_device(self, call: Call, count: int, host_seconds: float) -> float:
        """Seconds of the device per call, over `count` calls that the host takes that long for."""

    def allocated(self) -> int | None:
        """Bytes of the tensors that exist, or None where nobody counts them."""


class CudaClock:
    """CUDA's events around calls that all wait in the queue when the first begins."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self._cycles_per_second = 1e3 * float(getattr(properties, "clock_rate", 2_000_000))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def on_device(self, call: Call, count: int, host_seconds: float) -> float:
        event: Any = torch.cuda.Event
        sleep: Any = torch.cuda._sleep
        first, last = event(enable_timing=True), event(enable_timing=True)
        # The device idles until the host has asked for all steps, so that it never waits between
        # them, as far as the queue holds their kernels.
        wait = min(2.0, 1.5 * count * host_seconds + 1e-3)
        sleep(int(wait * self._cycles_per_second))
        first.record()
        for _ in range(count):
            call()
        last.record()
        self.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / count

    def allocated(self) -> int | None:
        return torch.cuda.memory_allocated(self.device)


class HostClock:
    """For devices that do what they are asked at once: the processor."""

    device = torch.device("cpu")

    def synchronize(self) -> None:
        return

    def on_device(self, call: Call, count: int, host_seconds: float) -> float:
        began = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - began) / count

    def allocated(self) -> int | None:
        return None


def _tensors(case: Case, device: torch.device, seed: int) -> list[Tensor]:
    """Numbers that bfloat16 holds exactly, as small as weights."""
    generator = torch.Generator(device).manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, device=device).mul_(0.02).bfloat16().float()
        for shape in case.shapes()
    ]


def _on_host(call: Call, clock: Clock) -> float:
    """Seconds until the call returns, on an idle device."""
    clock.synchronize()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@dataclass(frozen=True)
class _Copy:
    """The limit: a copy within the device's memory."""

    call: Call
    bytes: int


def _copy(clock: Clock, probe_bytes: int) -> _Copy:
    source = torch.zeros(probe_bytes // 8, device=clock.device)
    target = torch.empty_like(source)
    return _Copy(lambda: target.copy_(source), 2 * source.nbytes)


def _measure(
    entrant: Entrant,
    record: dict[str, Any],
    data: tuple[list[Tensor], list[Tensor]],
    settings: GpuOptimSettings,
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
    step = cast(Call, optimizer.step)
    guess = min(_on_host(step, clock) for _ in range(3))
    clock.synchronize()
    alone = clock.on_device(step, 1, guess)
    # Some peers start a kernel for each tensor.
    most = min(MOST_STEPS, QUEUE // len(parameters))
    count = max(1, min(most, int(SERIES_SECONDS / max(alone, 1e-6))))
    copy = _copy(clock, settings.probe_bytes)
    clock.on_device(copy.call, 3, 1e-4)
    bandwidth, seconds, host = [], [], []
    for _ in range(settings.rounds):
        bandwidth.append(copy.bytes / clock.on_device(copy.call, 3, 1e-4))
        seconds.append(clock.on_device(step, count, guess))
        host.append(_on_host(step, clock))
    clock.synchronize()
    elements = sum(parameter.numel() for parameter in parameters)
    moved = 2 * (states + dtype.itemsize * elements) + dtype.itemsize * elements
    record.update(
        state_bytes_per_parameter=states / elements,
        bytes_per_parameter=states / elements + dtype.itemsize,
        bytes=moved,
        rounds=seconds,
        seconds=spread_record(spread(seconds)),
        host_seconds=spread_record(spread(host)),
        copy_bandwidth=spread_record(spread(bandwidth)),
        bandwidth=spread_record(spread([moved / value for value in seconds])),
        fraction_of_limit=spread_record(
            paired_ratio([moved / rate for rate in bandwidth], seconds)
        ),
    )


def _state_bytes(
    optimizer: Optimizer, parameters: Sequence[Tensor], before: int | None, after: int | None
) -> int:
    """What the optimizer keeps beside the parameters: states, lower halves, tables."""
    if before is not None and after is not None:
        return after - before
    return kept_bytes(optimizer, parameters) - sum(parameter.nbytes for parameter in parameters)


def run_case(
    case: Case,
    settings: GpuOptimSettings,
    clock: Clock | None = None,
    progress: Progress = no_progress,
) -> Iterator[dict[str, Any]]:
    """Measure steps of all optimizers on the tensors of a case; a result for each, as JSON.

    A step's least traffic is that of parameters, gradients and states, each read once and all but
    the gradients written once. Its fraction of the limit is the time for that traffic at the
    bandwidth of a copy in the same round, divided by its time on the device.
    """
    clock = CudaClock() if clock is None else clock
    data = _tensors(case, clock.device, 0), _tensors(case, clock.device, 1)
    for name in settings.optimizers:
        expected = expected_change(name)
        records = []
        for entrant in entrants(name, settings.peers, settings.formats):
            peer = entrant.name.split(" ")[0]
            progress(peer, f"{case.name} {name} {entrant.format}")
            record = check(entrant, expected, clock.device)
            if record["status"] == "measured":
                try:
                    _measure(entrant, record, data, settings, clock)
                except Exception as error:  # any failure of a peer is a result, with its reason
                    refuse_for(cast(Any, record), error)
            gc.collect()
            records.append(record)
        yield _result(name, case, records, clock)


def _result(name: str, case: Case, records: list[dict[str, Any]], clock: Clock) -> dict[str, Any]:
    measured = {record["peer"]: record for record in records if record["status"] == "measured"}
    base = next((peer for peer in ("fused", "foreach", "optimi") if peer in measured), None)
    for record in measured.values():
        if base is not None:
            record["speedup"] = spread_record(
                paired_ratio(measured[base]["rounds"], record["rounds"])
            )
    rates = [record["copy_bandwidth"]["median"] for record in measured.values()]
    return {
        "optimizer": name,
        "case": case.name,
        "title": case.title,
        "device": device_name(clock.device),
        "tensors": len(case.shapes()),
        "parameters": sum(math.prod(shape) for shape in case.shapes()),
        "options": {"lr": LEARNING_RATE, **OPTIMIZERS[name]},
        "base": base,
        "read_write_bandwidth": spread_record(spread(rates)) if rates else None,
        "peers": records,
    }


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "processor"


def run_job(job: dict[str, Any], progress: Progress) -> Iterator[dict[str, Any]]:
    """`run_case` for the worker process: every argument comes as JSON."""
    settings = GpuOptimSettings(
        optimizers=job["optimizers"],
        peers=job["peers"],
        formats=job["formats"],
        rounds=job["rounds"],
    )
    for case in job["cases"]:
        yield from run_case(CASES[case], settings, None, progress)
