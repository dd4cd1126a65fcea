"""What this machine can do at most: memory bandwidth and matrix products, measured here and now.

The bandwidth of a buffer depends on where its pages happen to lie, so the limit is measured
beside each op, in the same rounds, on buffers that are allocated as the op's are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from oxytorch.benchmark.core.contest import Progress, no_progress
from oxytorch.benchmark.core.jobs import Settings
from oxytorch.benchmark.core.results import Result
from oxytorch.benchmark.core.rounds import Call, interleave, spread

MATRIX_SIZE = 2048
"""Side of the square matrices whose product is timed."""


@dataclass(frozen=True)
class Probe:
    """A way of approaching a limit: the work of one call, in bytes or operations."""

    call: Call
    work: float


class BandwidthProbes:
    """Reads, copies and changes of one buffer; the best way of each kind counts as the limit.

    Args:
        traffic: bytes that a copy moves, half of them read and half written.
        threads: number of threads.
    """

    def __init__(self, traffic: int, threads: int) -> None:
        self._source = torch.rand(max(64 * threads, traffic // 8))
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def read(self) -> dict[str, Probe]:
        """Reductions that read the buffer once."""
        source = self._source
        return {
            "sum": Probe(lambda: torch.sum(source), source.nbytes),
            "dot": Probe(lambda: torch.dot(source, source), source.nbytes),
        }

    def read_write(self) -> dict[str, Probe]:
        """Copies into a new buffer; `memmove` uses streaming stores on large buffers."""
        source = self._source
        return {
            "copy": Probe(lambda: torch.empty_like(source).copy_(source), 2 * source.nbytes),
            "memmove": Probe(self._memmove, 2 * source.nbytes),
        }

    def update(self) -> dict[str, Probe]:
        """A change in place, which reads and writes the same lines, as steps of optimizers do."""
        source = self._source
        return {"update": Probe(source.neg_, 2 * source.nbytes)}

    def _memmove(self) -> Tensor:
        """The C library's copy, one slice per thread (ctypes releases the interpreter lock)."""
        source = self._source
        target = torch.empty_like(source)
        step = -(-source.nbytes // self._threads)
        slices = [
            (offset, min(step, source.nbytes - offset)) for offset in range(0, source.nbytes, step)
        ]
        done = [
            self._pool.submit(
                ctypes.memmove, target.data_ptr() + offset, source.data_ptr() + offset, size
            )
            for offset, size in slices
        ]
        wait(done)
        return target

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def matrix_product(dtype: torch.dtype, size: int = MATRIX_SIZE) -> Probe:
    """torch's product of two square matrices (oneDNN or MKL)."""
    left = torch.randn(size, size).to(dtype)
    right = torch.randn(size, size).to(dtype)
    return Probe(lambda: left @ right, 2.0 * size**3)


def best_rates(probes: Mapping[str, Probe], series: Mapping[str, Sequence[float]]) -> list[float]:
    """Work per second of the best probe in each round, by the seconds of its turns."""
    rates = [[probe.work / value for value in series[name]] for name, probe in probes.items()]
    return [max(of_round) for of_round in zip(*rates, strict=True)]


def measured_rates(probes: Mapping[str, Probe], rounds: int) -> list[float]:
    """Work per second of the best probe, one value per round."""
    calls = {name: probe.call for name, probe in probes.items()}
    return best_rates(probes, interleave(calls, rounds=rounds, warm_up=2))


def measure_limits(
    threads: int,
    rounds: int,
    traffic: int = 512 << 20,
    matrix_size: int = MATRIX_SIZE,
    progress: Progress = no_progress,
) -> dict[str, list[float]]:
    """Every limit of this machine, a value per round, in bytes or operations per second."""
    rates: dict[str, list[float]] = {}
    # Two sets of buffers: the second usually lies on other pages than the first.
    for _ in range(2):
        probes = BandwidthProbes(traffic, threads)
        for name, ways in (("read", probes.read()), ("read_write", probes.read_write())):
            progress("", name)
            rates.setdefault(name, []).extend(measured_rates(ways, rounds))
        probes.close()
    for dtype in (torch.float32, torch.bfloat16):
        name = f"matrix_product_{str(dtype).removeprefix('torch.')}"
        progress("", name)
        product = {"product": matrix_product(dtype, matrix_size)}
        rates[name] = measured_rates(product, rounds)
    return rates


def run_job(progress: Progress, settings: Settings) -> Result:
    """`measure_limits` for the worker process: median and quartiles of each limit."""
    rates = measure_limits(settings.threads, settings.rounds, progress=progress)
    return {name: spread(values) for name, values in rates.items()}
