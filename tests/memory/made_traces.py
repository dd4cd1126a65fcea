"""Traces made up of what real programs do, and torch's history of serving them."""

from __future__ import annotations

import random
from typing import Any

from oxytorch.memory.stock import Settings, StockAllocator
from oxytorch.memory.trace import Kind, Queue, Trace

MiB = 1 << 20


def training(steps: int = 6, layers: int = 12, seed: int = 0) -> Trace:
    """Weights and gradients that stay, activations of another length in each step."""
    choose, trace = random.Random(seed), Trace()
    width, clock = 1024, 0

    def alloc(size: int) -> int:
        nonlocal clock
        clock += choose.randint(1, 40)
        return trace.alloc(size, 0, clock)

    def free(number: int) -> None:
        nonlocal clock
        clock += choose.randint(1, 10)
        trace.event(Kind.FREE, number, clock)

    for _ in range(layers):
        for size in (width * width * 2, width * width * 8, width * 4, width * 2):
            alloc(size)
    for step in range(steps):
        trace.mark(f"step {step}")
        rows = choose.randint(100, 4000)
        kept: list[list[int]] = []
        for _ in range(layers):
            mine = []
            for part in (2, 2, 8, 8, 4, 2):
                mine.append(alloc(rows * width * part))
                if choose.random() < 0.5:
                    free(alloc(rows * 4))
                    free(alloc(rows * width * 4))
            kept.append(mine)
        logits = alloc(rows * 32000)
        gradient = alloc(rows * 32000)
        free(logits)
        for mine in reversed(kept):
            following = alloc(rows * width * 2)
            free(gradient)
            gradient = following
            for number in reversed(mine):
                other = alloc(rows * width * 2)
                free(number)
                free(other)
        free(gradient)
    return trace


def serving(requests: int = 40, layers: int = 8, seed: int = 1) -> Trace:
    """Caches that grow by a copy in each step, of several batches at once, on two streams."""
    choose, trace = random.Random(seed), Trace()
    trace.queue_list = [Queue(), Queue(7)]
    for _ in range(layers * 4):
        trace.alloc(5 * MiB + choose.randint(0, 3) * 512)
    active: list[tuple[list[int], int, int]] = []
    retired: list[int] = []
    while requests or active:
        if requests and len(active) < 5:
            requests -= 1
            rows, length = choose.randint(1, 12), choose.randint(20, 900)
            caches = [trace.alloc(rows * length * 512 * 2) for _ in range(2 * layers)]
            active.append((caches, rows, length))
        at = choose.randrange(len(active))
        caches, rows, length = active[at]
        for index, number in enumerate(caches):
            temporary = trace.alloc(rows * 4096, queue=choose.randint(0, 1))
            while retired:
                trace.event(Kind.REUSE, retired.pop())
            caches[index] = trace.alloc(rows * (length + 1) * 512 * 2)
            trace.event(Kind.FREE, number)
            if choose.random() < 0.1:
                trace.event(Kind.RETIRE, temporary)
                retired.append(temporary)
            else:
                trace.event(Kind.FREE, temporary)
        active[at] = caches, rows, length + 1
        if choose.random() < 0.15:
            for number in caches:
                trace.event(Kind.FREE, number)
            del active[at]
    return trace


def history(trace: Trace, settings: Settings | None = None) -> tuple[dict[str, Any], int]:
    """What torch's history would hold of a trace, as in a snapshot, and the peak reserved."""
    allocator = StockAllocator(settings)
    entries: list[dict[str, Any]] = []
    held: dict[int, Any] = {}
    most = 0
    for kind, number, time in zip(trace.kinds, trace.which, trace.times, strict=True):
        before = allocator.reserved
        entry: dict[str, Any] = {"time_us": 1_700_000_000_000_000 + time}
        if kind == Kind.RELEASE:
            allocator.empty_cache()
            entries.append({**entry, "action": "segment_free", "addr": 0, "size": 0, "stream": 0})
            continue
        queue = trace.queue_list[trace.queues[number]]
        entry |= {"stream": queue.stream, "pool_id": queue.pool, "size": trace.sizes[number]}
        if kind == Kind.ALLOC:
            held[number] = allocator.allocate(trace.sizes[number], trace.queues[number])
            if allocator.reserved > before:
                grown = {"action": "segment_alloc", "size": allocator.reserved - before}
                entries.append({**entry, **grown, "addr": held[number].address})
            entries.append({**entry, "action": "alloc", "addr": held[number].address})
            most = max(most, allocator.reserved)
            continue
        entry["addr"] = held[number].address
        if kind in (Kind.FREE, Kind.RETIRE):
            entries.append({**entry, "action": "free_requested"})
        if kind in (Kind.FREE, Kind.REUSE):
            entries.append({**entry, "action": "free_completed"})
            allocator.free(held.pop(number))
    segments = [
        {
            "address": block.address,
            "total_size": block.size,
            "stream": trace.queue_list[trace.queues[number]].stream,
            "segment_pool_id": (0, 0),
            "device": 0,
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": trace.sizes[number],
                    "state": "active_allocated",
                }
            ],
        }
        for number, block in held.items()
    ]
    return {"device_traces": [entries], "segments": segments}, most
