"""Times programs that serve many sizes beside programs of one size each, in turns.

    python benchmarks/many_sizes.py [minilm|bert|resnet50|mobilenet_v2] [--rounds N] [--most N]

A model is optimized once for each size alone, and once for all sizes, in each of three orders in
which sizes come. Prints milliseconds of a call, medians of the rounds, and the ratios to the
program of the size alone. The largest error beside stock PyTorch stands at the end of a line. Then
a call of a size that has not been seen, beside later calls of that size, in the last of the orders.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import oxytorch
from oxytorch.rewriting import measure

Size = tuple[int, ...]

TEXTS: list[Size] = [(1, 16), (1, 128), (1, 512), (8, 64), (8, 128), (32, 128)]
IMAGES: list[Size] = [(1,), (2,), (8,), (32,)]
MODELS = ("minilm", "bert", "resnet50", "mobilenet_v2")


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "minilm":
        config = transformers.BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
        )
        return transformers.BertModel(config).eval()
    if name == "bert":
        return transformers.BertModel(transformers.BertConfig()).eval()
    if name == "resnet50":
        return transformers.ResNetForImageClassification(transformers.ResNetConfig()).eval()
    return transformers.MobileNetV2ForImageClassification(transformers.MobileNetV2Config()).eval()


def _inputs(size: Size) -> tuple[Tensor, ...]:
    if len(size) == 1:
        return (torch.randn(*size, 3, 224, 224),)
    return torch.randint(0, 30000, size), torch.ones(size, dtype=torch.int64)


def _orders(sizes: Sequence[Size]) -> list[list[Size]]:
    """Small ones first, large ones first, and one from the middle first."""
    middle = len(sizes) // 2
    return [[*sizes], [*reversed(sizes)], [*sizes[middle:], *sizes[:middle]]]


def _optimized(model: nn.Module, sizes: Sequence[Size], given: dict[Size, Any]) -> Any:
    measure._known.clear()  # times of layers, which another order must not decide
    made = oxytorch.optimize(model, sample_input=given[sizes[0]], graph=True, passes=["program"])
    for size in (size for _ in range(3) for size in sizes):
        made(*given[size])
    return made


def _first(output: Any) -> Tensor:
    found: Tensor = output[0]
    return found


def measured(name: str, rounds: int, most: int) -> None:
    """Prints a line for each size."""
    sizes = [s for s in (IMAGES if name in MODELS[2:] else TEXTS) if s[0] * s[-1] <= most]
    model, given = _model(name), {size: _inputs(size) for size in sizes}
    own = {size: _optimized(model, [size], given) for size in sizes}
    families = [_optimized(model, order, given) for order in _orders(sizes)]
    for size in sizes:
        models = [model, own[size], *families]
        wanted = _first(model(*given[size]))
        error = max(float((_first(m(*given[size])) - wanted).abs().max()) for m in models)
        times: list[list[float]] = [[] for _ in models]
        for _ in range(rounds):
            for each, found in zip(models, times, strict=True):
                began = time.perf_counter()
                each(*given[size])
                found.append((time.perf_counter() - began) * 1e3)
        stock, alone, *shared = map(statistics.median, times)
        ratios = "  ".join(f"{ms:.2f} ({ms / alone:.2f})" for ms in shared)
        print(
            f"{name} {size}: stock {stock:.2f}, of this size {alone:.2f}, of many {ratios}", end=""
        )
        print(f", error {error:.0e}", flush=True)
    measured_first(name, families[-1], sizes, rounds)


def measured_first(name: str, model: nn.Module, sizes: Sequence[Size], calls: int) -> None:
    """Prints how long the first call of a new size takes, and later ones."""
    for size in sizes:
        new = [(size[0] + n, *(length - n for length in size[1:])) for n in (1, 2, 3)]
        for known in new[:2]:  # at which the program is proven, if it is not yet
            model(*_inputs(known))
        given = _inputs(new[2])
        times = []
        for _ in range(calls + 1):
            began = time.perf_counter()
            model(*given)
            times.append((time.perf_counter() - began) * 1e3)
        first, later = times[0], statistics.median(times[1:])
        print(f"{name} {new[2]}: first call {first:.2f}, later {later:.2f} ({first / later:.2f})")
    print("\n".join(oxytorch.explain(model).calls))


def main() -> None:
    """Measures the models that are named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=[*MODELS], metavar="MODEL", help=str(MODELS))
    parser.add_argument("--rounds", type=int, default=9, help="rounds (default: 9)")
    parser.add_argument(
        "--most", type=int, default=4096, help="largest size (default: 4096 tokens)"
    )
    arguments = parser.parse_args()
    with torch.inference_mode():
        for name in arguments.models:
            measured(name, arguments.rounds, arguments.most)


if __name__ == "__main__":
    main()
