"""What `oxytorch.runtime` adds to a call, with a function that returns its argument.

    python benchmarks/runtime_overhead.py

The first line is a bare hand-over to another Python thread and back, which no way of ours can be
faster than. On an idle machine most of it is the system waking a processor that sleeps.
"""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections.abc import Callable

import torch

from oxytorch.runtime import CPUPool, MultiStreamModule, Task, pin

CALLS = 2000


def measured(name: str, call: Callable[[], object]) -> None:
    """Prints median and 90th percentile of the calls' microseconds."""
    for _ in range(CALLS // 10):
        call()
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    print(
        f"{name:32} {statistics.median(times):6.1f} us  90 %: {sorted(times)[CALLS * 9 // 10]:6.1f}"
    )


def same(x: torch.Tensor) -> torch.Tensor:
    """The function that is called."""
    return x


def bare() -> Callable[[], object]:
    """A hand-over without anything else."""
    calls: queue.SimpleQueue[threading.Lock] = queue.SimpleQueue()

    def serve() -> None:
        while True:
            calls.get().release()

    threading.Thread(target=serve, daemon=True).start()
    lock = threading.Lock()
    lock.acquire()

    def call() -> None:
        calls.put(lock)
        lock.acquire()

    return call


def block(pool: CPUPool) -> None:
    """An empty block."""
    with pin(pool):
        pass


@torch.inference_mode()
def main() -> None:
    """Measures every way."""
    pool = CPUPool()
    measured("a hand-over to a thread and back", bare())
    task = Task(same, pool)
    measured("Task", lambda: task(torch.ones(0)).get())
    for streams in sorted({1, min(2, len(pool)), min(4, len(pool)), len(pool)}):
        module, x = MultiStreamModule(same, streams, pool), torch.ones(streams, 1)
        measured(f"MultiStreamModule, {streams} streams", lambda module=module, x=x: module(x))
    measured("with pin(pool)", lambda: block(pool))


if __name__ == "__main__":
    main()
