"""What a parallel region of torch's threads takes: a small kernel on one thread and split over all.

    python benchmarks/parallel_regions.py [--threads 2,4] [--gaps 0,20,1000]

The calling thread is busy for a gap before each call, as Python is between layers: after a longer
one the other threads sleep. The difference of the two columns is the region.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from oxytorch import ops
from oxytorch._library import functions

ALL_SPLIT, NONE_SPLIT = 1, 1 << 30
"""Bytes of work from which on a kernel is split."""


def main() -> None:
    """Measures and prints a line for each number of threads and each gap."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = str(torch.get_num_threads())
    parser.add_argument("--threads", default=usual, help=f"of torch's team (default: {usual})")
    parser.add_argument(
        "--gaps", default="0,20,60,200,1000,5000", help="microseconds between calls"
    )
    options = parser.parse_args()
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        for gap in map(int, options.gaps.split(",")):
            alone, split = (_microseconds(gap, least) for least in (NONE_SPLIT, ALL_SPLIT))
            print(
                f"{threads} threads, {gap} us apart: {alone[0]:.1f} us on one thread "
                f"(ninth decile {alone[1]:.1f}), {split[0]:.1f} us split ({split[1]:.1f})",
                flush=True,
            )


def _microseconds(gap: int, least: int) -> tuple[float, float]:
    """Median and ninth decile of the kernel's time."""
    x, weight = torch.randn(64, 64), torch.ones(64)
    functions().oxytorch_set_tuning(-1, least, 0)
    found = []
    try:
        with torch.inference_mode():
            for _ in range(200 if gap < 1000 else 60):
                end = time.perf_counter() + gap * 1e-6
                while time.perf_counter() < end:
                    pass
                began = time.perf_counter()
                ops.rms_norm(x, weight)
                found.append(1e6 * (time.perf_counter() - began))
    finally:
        functions().oxytorch_set_tuning(-1, -1, 0)
    return statistics.median(found), statistics.quantiles(found, n=10)[-1]


if __name__ == "__main__":
    main()
