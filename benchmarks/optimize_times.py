"""How long `oxytorch.optimize(model, sample_input=x, graph=True)` takes, in fresh processes.

    python benchmarks/optimize_times.py [MODEL ...] [--dtype bfloat16] [--processes N]

Prints a line of Markdown for each model of `oxytorch bench models` or `oxytorch bench zoo` that is
named: seconds for the first model of a process, and for a second one with other weights, whose
layers' times are known; medians of the processes. Then milliseconds of a call of the result. The
processes keep what Python compiles of the package, as an installation has it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

import oxytorch
from oxytorch.benchmark.models.cases import CASES, call_model
from oxytorch.benchmark.zoo.cases import ZOO

CALLS = 9


def measured(name: str, dtype: torch.dtype | None) -> list[float]:
    """Seconds for a first and a second model, and of a call."""
    seconds, case = [], {**ZOO, **CASES}[name]
    for _ in range(2):
        model, inputs = case.build(case.batch)
        began = time.perf_counter()
        fast = oxytorch.optimize(model, dtype=dtype, sample_input=inputs, graph=True)
        seconds.append(time.perf_counter() - began)
    calls = []
    with torch.no_grad():
        for _ in range(CALLS + 2):
            began = time.perf_counter()
            call_model(fast, inputs)
            calls.append(time.perf_counter() - began)
    return [*seconds, statistics.median(calls[2:])]


def in_fresh_processes(name: str, dtype: str, processes: int) -> list[float]:
    """Medians of several processes."""
    command = [sys.executable, __file__, name, "--dtype", dtype, "--here"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    found = [
        json.loads(
            subprocess.run(
                command, check=True, capture_output=True, text=True, env=environment
            ).stdout
        )
        for _ in range(processes)
    ]
    return [statistics.median(times) for times in zip(*found, strict=True)]


def main() -> None:
    """Measure the models that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["bert", "resnet50"], metavar="MODEL")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        dtype: Any = None if given.dtype == "float32" else torch.bfloat16
        print(json.dumps(measured(given.models[0], dtype)))
        return
    print("| model | first | second | call |\n|---|---|---|---|", flush=True)
    for name in given.models:
        first, second, call = in_fresh_processes(name, given.dtype, given.processes)
        print(f"| {name} | {first:.2f} s | {second:.2f} s | {call * 1e3:.1f} ms |", flush=True)


if __name__ == "__main__":
    main()
