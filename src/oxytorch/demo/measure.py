"""Times calls in turns, and measures memory in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median


def interleaved(
    calls: Mapping[str, Callable[[], object]], *, seconds: float = 0.0, rounds: int = 1
) -> dict[str, float]:
    """Median seconds of each call, over rounds in which every call has its turn.

    At least `rounds` rounds, and more until `seconds` have passed. Each round starts with another
    call, so that no call always follows the same one.
    """
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    end = time.perf_counter() + seconds
    done = 0
    while done < rounds or time.perf_counter() < end:
        shift = done % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - start)
        done += 1
    return {name: median(taken) for name, taken in times.items()}


def peak_memory(variant: str, text: Path, most: int) -> int | None:
    """Peak bytes of one variant in a fresh process; None where the system has no /proc."""
    if not Path("/proc/self/status").exists():
        return None
    command = [sys.executable, "-m", "oxytorch.demo.memory", variant, str(text), str(most)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"measuring the memory of {variant} failed:\n{done.stderr.strip()}")
    return int(done.stdout.split()[-1])
