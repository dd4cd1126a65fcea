"""Times steps of optimizers over few or small tensors: torch's and oxytorch's, in turns.

    python benchmarks/small_steps.py [--rounds N]

Prints medians of the rounds in microseconds, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from oxytorch import optim

MLP = [(128, 784), (128,), (128, 128), (128,), (10, 128), (10,)]
CASES: dict[str, Sequence[tuple[int, ...]]] = {
    "one of 10": [(10,)],
    "perceptron of six": MLP,
    "64 of 64": [(64,)] * 64,
    "four of 512 x 512": [(512, 512)] * 4,
    "16 of 1024 x 1024": [(1024, 1024)] * 16,
}
STEPS: Sequence[tuple[str, dict[str, float]]] = (
    ("SGD", {}),
    ("SGD", {"weight_decay": 1e-4}),
    ("SGD", {"momentum": 0.9}),
    ("AdamW", {}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    rounds = parser.parse_args().rounds
    print(f"{'tensors':20} {'step':32} {'torch us':>9} {'oxytorch us':>12} {'ratio':>6}")
    for case, shapes in CASES.items():
        for name, options in STEPS:
            steps = [made(module, name, options, shapes) for module in (torch.optim, optim)]
            count = max(3, min(200, 2_000_000 // sum(map(elements, shapes))))
            times: list[list[float]] = [[], []]
            for _ in range(rounds):
                for step, own in zip(steps, times, strict=True):
                    own.append(timed(step, count))
            stock, ours = map(statistics.median, times)
            label = f"{name} {options or ''}"
            print(f"{case:20} {label:32} {stock:9.1f} {ours:12.1f} {ours / stock:6.2f}", flush=True)


def elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def made(
    module: object, name: str, options: dict[str, float], shapes: Sequence[tuple[int, ...]]
) -> Callable[[], object]:
    """The step of a new optimizer over new parameters that have gradients."""
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    step: Callable[[], object] = getattr(module, name)(parameters, lr=1e-4, **options).step
    return step


def timed(step: Callable[[], object], count: int) -> float:
    """Microseconds of a step, one not counted before them."""
    step()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - begin) / count * 1e6


if __name__ == "__main__":
    main()
