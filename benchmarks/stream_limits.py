"""What streams could gain at most: one call on all cores beside as many processes as cores.

    python benchmarks/stream_limits.py [--dtype bfloat16] [--batch 16]

Prints the milliseconds of a call of ResNet-50 on 1, 2, 4, ... cores, the processors' time of each,
and then the rate of one process on each core, all at the same time, which share the batch: no
streams can give more.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from typing import Any

import torch
from torch.utils import _pytree as pytree

import oxytorch
from oxytorch.benchmark.models.cases import CASES, call_model
from oxytorch.runtime import CPUPool, MultiStreamModule, MultiStreamModuleHint, pin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="resnet50", choices=[*CASES])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each figure")
    given = parser.parse_args()
    cores = CPUPool().core_ids
    counts = [1 << power for power in range(12) if 1 << power < len(cores)] + [len(cores)]
    print(f"{given.model} {given.dtype} batch {given.batch}, ms of a call (processors' time)")
    for count in counts:
        with pin(CPUPool(cores[:count])):
            model, inputs = optimized(given, given.batch)
            wall, busy = timed(lambda m=model, i=inputs: call_model(m, i), given.seconds)
        print(f"  one call on {count} cores: {wall:.1f} ({busy:.1f})", flush=True)
    best = wall
    for count in counts[1:]:
        with pin(CPUPool(cores[: len(cores) // count])):
            model, inputs = optimized(given, -(-given.batch // count))
        _, inputs = CASES[given.model].build(given.batch)
        inputs = converted(inputs, given.dtype)
        names = inputs if isinstance(inputs, dict) else {}
        hint = MultiStreamModuleHint(
            *[0] * (0 if names else len(inputs)), **dict.fromkeys(names, 0)
        )
        streams = MultiStreamModule(model, count, CPUPool(cores), input_split_hint=hint)
        wall, busy = timed(lambda s=streams, i=inputs: call_model(s, i), given.seconds)
        print(f"  {count} streams: {wall:.1f} ({busy:.1f}), {best / wall:.2f}x", flush=True)
    context = multiprocessing.get_context("spawn")
    for parts in dict.fromkeys((len(cores), max(1, len(cores) // 2))):
        each = len(cores) // parts
        ready, found = context.Barrier(parts), context.Queue()
        jobs = [
            context.Process(
                target=work, args=(given, cores[n * each : n * each + each], parts, ready, found)
            )
            for n in range(parts)
        ]
        for job in jobs:
            job.start()
        rate = sum(found.get() for _ in jobs)
        for job in jobs:
            job.join()
        wall = given.batch / rate * 1e3
        print(f"  {parts} processes of {each} cores: {wall:.1f} a batch, {best / wall:.2f}x")


def work(given: Any, cores: list[int], parts: int, ready: Any, found: Any) -> None:
    """A process: puts the items a second of its part of the batch."""
    batch = -(-given.batch // parts)
    with pin(CPUPool(cores)):
        model, inputs = optimized(given, batch)
        ready.wait()
        wall, _ = timed(lambda: call_model(model, inputs), given.seconds)
    found.put(batch / wall * 1e3)


def converted(inputs: Any, dtype: str) -> Any:
    return pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(getattr(torch, dtype)) if x.is_floating_point() else x, inputs
    )


def optimized(given: Any, batch: int) -> tuple[Any, Any]:
    """The model for the cores of this thread, and inputs."""
    model, inputs = CASES[given.model].build(batch)
    dtype = getattr(torch, given.dtype)
    inputs = converted(inputs, given.dtype)
    chosen = None if dtype == torch.float32 else dtype
    return oxytorch.optimize(model, dtype=chosen, sample_input=inputs, graph=True), inputs


def timed(call: Any, seconds: float) -> tuple[float, float]:
    """Median milliseconds of a call, and those of all processors."""
    walls = []
    with torch.inference_mode():
        for _ in range(3):
            call()
        end, busy = time.perf_counter() + seconds, time.process_time()
        while time.perf_counter() < end:
            begin = time.perf_counter()
            call()
            walls.append(time.perf_counter() - begin)
    busy = time.process_time() - busy
    return statistics.median(walls) * 1e3, busy / len(walls) * 1e3


if __name__ == "__main__":
    main()
