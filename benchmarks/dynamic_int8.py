"""How fast recurrent layers and embedding bags of bytes are, and how near to floating ones.

python benchmarks/dynamic_int8.py [--rounds N]     prints two tables

Every layer is run once in each round, in turns; the tables have medians of the rounds. The error is
the root mean square of the difference from stock float32, relative to that of stock float32.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

import oxytorch
from oxytorch.quantization import Int8DynamicActivationInt8Weight

SHAPES = ((256, 256), (512, 1024))
BATCHES = 1, 16
STEPS = 32
ROWS, WIDTH, BAGS, LENGTH = 1_000_000, 64, 512, 32
LOOK_UPS = 64
"""Sets of indices that are taken in turn: those of one set would stay in a cache."""
BYTES = Int8DynamicActivationInt8Weight(only_faster=False)

Run = Callable[[], Tensor]


class Layer(nn.Module):
    """A layer, called by a model; the outputs of all steps alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *given: Tensor) -> Tensor:
        """The first result of the layer."""
        found = self.layer(*given)
        return found[0] if isinstance(found, tuple) else found


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    print(
        f"{oxytorch.isa.active()}, {torch.get_num_threads()} threads, torch {torch.__version__}\n"
    )
    print("| layer | batch | stock | torch int8 | float32 | bfloat16 | int8 | taken | error |")
    print("|---|---|---|---|---|---|---|---|---|")
    for kind in (nn.LSTM, nn.GRU):
        for inputs, hidden in SHAPES:
            for batch in BATCHES:
                _recurrent(kind, inputs, hidden, batch, rounds)
    print("\n| bags | stock | float32 | int8 | read at | taken | error |")
    print("|---|---|---|---|---|---|---|")
    _bags(rounds)


def _recurrent(kind: type[nn.Module], inputs: int, hidden: int, batch: int, rounds: int) -> None:
    torch.manual_seed(0)
    stock = Layer(kind(inputs, hidden)).eval()
    x = torch.randn(STEPS, batch, inputs)
    theirs = torch.ao.quantization.quantize_dynamic(stock, {kind}, dtype=torch.qint8)
    narrow = oxytorch.optimize(stock, dtype=torch.bfloat16, sample_input=x)
    models = {
        "stock": stock,
        "torch": theirs,
        "float32": oxytorch.optimize(stock, sample_input=x),
        "bfloat16": narrow,
        "int8": _of_bytes(stock),
    }
    times, error = _measured({n: _calls(m, x) for n, m in models.items()}, rounds)
    name = f"{kind.__name__} {inputs} to {hidden}"
    shown = " | ".join(_shown(each) for each in times.values())
    print(f"| {name} | {batch} | {shown} | {_is_taken(stock)} | {error:.2%} |", flush=True)


def _bags(rounds: int) -> None:
    torch.manual_seed(0)
    stock = Layer(nn.EmbeddingBag(ROWS, WIDTH, mode="sum")).eval()
    offsets = torch.arange(0, BAGS * LENGTH, LENGTH)
    sets = [torch.randint(ROWS, (BAGS * LENGTH,)) for _ in range(LOOK_UPS)]
    models = {
        "stock": stock,
        "float32": oxytorch.optimize(stock, sample_input=(sets[0], offsets)),
        "int8": _of_bytes(stock),
    }

    def calls(model: nn.Module) -> Run:
        given = cycle(sets)
        return lambda: model(next(given), offsets)  # type: ignore[no-any-return]

    times, error = _measured({n: calls(m) for n, m in models.items()}, rounds)
    speed = BAGS * LENGTH * (WIDTH + 8) / times["int8"] / 1e9
    shown = " | ".join(_shown(each) for each in times.values())
    name = f"{BAGS} of {LENGTH}, {ROWS} x {WIDTH}"
    print(f"| {name} | {shown} | {speed:.1f} GB/s | {_is_taken(stock)} | {error:.2%} |")


def _of_bytes(stock: nn.Module) -> nn.Module:
    model = copy.deepcopy(stock)
    oxytorch.quantize_(model, BYTES)
    return model


def _is_taken(stock: nn.Module) -> str:
    """Whether `quantize_` takes the layer by default."""
    report = oxytorch.quantize_(copy.deepcopy(stock), Int8DynamicActivationInt8Weight())
    return "yes" if report.layers else "no"


def _calls(model: nn.Module, x: Tensor) -> Run:
    return lambda: model(x)  # type: ignore[no-any-return]


@torch.inference_mode()
def _measured(runs: Mapping[str, Run], rounds: int) -> tuple[dict[str, float], float]:
    """Medians in seconds, and the error of int8."""
    wanted, found = runs["stock"](), runs["int8"]()
    error = float((found - wanted).norm() / wanted.norm())
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in seconds.items()}, error


def _shown(seconds: Any) -> str:
    return f"{seconds * 1e3:.3g} ms"


if __name__ == "__main__":
    main()
