"""Times `torch.compile(model, backend="oxytorch")` beside eager PyTorch, in turns.

    python benchmarks/compile_backend.py [MODEL ...]

Prints a line of Markdown for each model of `oxytorch bench zoo` that is named: seconds of the first
call, milliseconds of a call of each, and the median of the ratios of single rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from oxytorch.benchmark.models.cases import call_model
from oxytorch.benchmark.zoo.cases import ZOO
from oxytorch.program.backend import compile_graph

MODELS = ("bert", "resnet50", "electra", "esm", "mobilenet_v2", "tcn", "dlrm", "llama")
ROUNDS, CALLS = 12, 3


def seconds(run: Callable[[], object], calls: int) -> float:
    """Of a call, after one that is not counted."""
    run()
    began = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - began) / calls


def measured(name: str) -> str:
    """The line of a model."""
    model, inputs = ZOO[name].build(1)
    torch._dynamo.reset()
    compiled = torch.compile(model.eval(), backend=compile_graph)
    began = time.perf_counter()
    call_model(compiled, inputs)
    first = time.perf_counter() - began
    pairs = [
        [seconds(lambda run=run: call_model(run, inputs), CALLS) for run in (model, compiled)]
        for _ in range(ROUNDS)
    ]
    eager, program = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    title = ZOO[name].title
    return f"| {title} | {first:.2f} s | {eager:.2f} ms | {program:.2f} ms | {ratio:.2f}x |"


def main() -> None:
    """Measure the models that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    with torch.no_grad():
        print("| model | first call | eager | program | eager / program |")
        print("|---|---|---|---|---|")
        for name in parser.parse_args().models:
            print(measured(name), flush=True)


if __name__ == "__main__":
    main()
