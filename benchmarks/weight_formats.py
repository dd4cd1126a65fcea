"""How long a product takes with a weight of each format, and at what part of memory's speed.

python benchmarks/weight_formats.py [--isa A,B] [--rows A,B] [--formats A,B]     prints a table

A format is a name, or a name and a group size: fp8, fp8/128. In every round the memory is read once
(by torch.sum or torch.dot, whichever is faster) and every format is multiplied once; the table has
medians of the rounds, and of the rounds' fractions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import oxytorch
from oxytorch.core.placement import empty_bytes
from oxytorch.ops.linear_panels import linear
from oxytorch.ops.panels import PanelWeight
from oxytorch.ops.panels.formats import FORMATS
from oxytorch.ops.panels.samples import weight_of_codes

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", default=oxytorch.isa.active(), help="levels")
    parser.add_argument("--rows", default="1", help="numbers of rows")
    parser.add_argument("--formats", default="bf16,int8,int8/128,fp8,fp8/128")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of x")
    parser.add_argument("--shape", default="16384x8192", help="outputs x inputs")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    outputs, inputs = map(int, arguments.shape.split("x"))
    weights = {name: _weight(name, outputs, inputs) for name in arguments.formats.split(",")}
    reads = _reads(outputs * inputs)
    print(
        f"[{outputs}, {inputs}], {arguments.dtype}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}\n"
    )
    print("| level | rows | format | time | read at | of the limit |")
    print("|---|---|---|---|---|---|")
    for level in arguments.isa.split(","):
        for rows in map(int, arguments.rows.split(",")):
            x = torch.randn(rows, inputs).to(DTYPES[arguments.dtype])
            with oxytorch.isa.use(level):
                for line in _measured(x, weights, reads, arguments.rounds):
                    print(f"| {level} | {rows} | {line} |", flush=True)


def _weight(name: str, outputs: int, inputs: int) -> PanelWeight:
    format, _, size = name.partition("/")
    if format not in FORMATS:
        raise SystemExit(f"--formats: expected names of {', '.join(FORMATS)}, got {format!r}")
    return weight_of_codes(format, outputs, inputs, int(size) if size else None, False)


def _reads(count: int) -> list[Callable[[], Tensor]]:
    """Ways to read `count` bytes once, in memory that lies as that of weights."""
    buffer = empty_bytes(count).view(torch.float32).fill_(1.0)
    return [lambda: torch.sum(buffer), lambda: torch.dot(buffer, buffer)]


@torch.no_grad()
def _measured(
    x: Tensor, weights: dict[str, PanelWeight], reads: list[Callable[[], Tensor]], rounds: int
) -> list[str]:
    count = next(iter(weights.values())).numel()
    times: dict[str, list[float]] = {name: [] for name in weights}
    limits: list[float] = []
    for index in range(rounds + 1):
        limit = count / min(_seconds(read) for read in reads)
        taken = {name: _seconds(lambda w=weight: linear(x, w)) for name, weight in weights.items()}
        if index == 0:
            continue
        limits.append(limit)
        for name, seconds in taken.items():
            times[name].append(seconds)
    lines = []
    for name, weight in weights.items():
        rates = [weight.nbytes_packed() / seconds for seconds in times[name]]
        fractions = [rate / limit for rate, limit in zip(rates, limits, strict=True)]
        lines.append(
            f"{name} | {statistics.median(times[name]) * 1e3:.2f} ms | "
            f"{statistics.median(rates) / 1e9:.1f} GB/s | {statistics.median(fractions):.0%}"
        )
    return lines


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
