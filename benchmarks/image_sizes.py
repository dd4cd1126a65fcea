"""Times programs of `oxytorch.optimize(graph=True)` on images and signals of ever other sizes.

    python benchmarks/image_sizes.py [--models A,B,...] [--dtype float32|bfloat16] [--count N]

Models of `oxytorch bench zoo`. Prints a row of Markdown for each model: the first two calls of the
first new sizes, of the later ones, and calls from the sixth on beside stock PyTorch in the same
dtype, in turns: medians over the sizes. Then the largest error beside stock PyTorch in float32, and
which sizes are served without the model's code.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import oxytorch
from oxytorch.benchmark.zoo.cases import ZOO

IMAGES = "resnet50,regnet,mobilenet_v2,convnext,poolformer,segformer,dinov2,detr,unet"
SIGNALS = "wav2vec2,hubert,tcn"
FIRST = 3
"""New sizes that a program learns from."""


def sizes_of(name: str, count: int) -> Iterator[tuple[int, ...]]:
    """Shapes of inputs, the first that of the sample."""
    draw = random.Random(0)
    for place in range(count):
        if name in ("wav2vec2", "hubert"):
            yield (1, 16_000 if place == 0 else draw.randint(9_000, 24_000))
        elif name == "tcn":
            yield (1, 128, 512 if place == 0 else draw.randint(200, 900))
        else:
            step = 32 if name == "unet" else 1
            sides = [step * draw.randint(160 // step, 288 // step) for _ in range(2)]
            yield (1, 3, *([224, 224] if place == 0 else sides))


def first_of(output: Any) -> Tensor:
    """The first tensor of an output."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output
    return next(each for each in values if isinstance(each, Tensor))


def milliseconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def row(name: str, dtype: torch.dtype, count: int) -> str:
    model, inputs = ZOO[name].build(1)
    key = next(iter(inputs)) if isinstance(inputs, dict) else None

    def run(each: nn.Module, x: Tensor) -> Any:
        return each(x) if key is None else each(**{key: x})

    shapes = [*sizes_of(name, count)]
    sample: Any = torch.randn(shapes[0])
    given = {} if dtype == torch.float32 else {"dtype": dtype}
    sample = sample if key is None else {key: sample}
    fast: Any = oxytorch.optimize(model, sample_input=sample, graph=True, **given)
    stock = copy.deepcopy(model).to(dtype)
    firsts, ratios, ours, errors = [], [], [], []
    for shape in shapes:
        x = torch.randn(shape)
        firsts.append([milliseconds(lambda x=x: run(fast, x)) for _ in range(2)])
        pairs = [
            (
                milliseconds(lambda x=x: run(stock, x.to(dtype))),
                milliseconds(lambda x=x: run(fast, x)),
            )
            for _ in range(8)
        ][3:]
        ours.append(statistics.median(own for _, own in pairs))
        ratios.append(statistics.median(other / own for other, own in pairs))
        found, wanted = first_of(run(fast, x)).float(), first_of(run(model, x))
        errors.append(float((found - wanted).norm() / wanted.norm()))
    new, later = firsts[1 : FIRST + 1], firsts[FIRST + 1 :]
    words = [
        "/".join(f"{statistics.median(column):.0f}" for column in zip(*part, strict=True))
        for part in (new, later)
    ]
    calls = [line for line in oxytorch.explain(fast).calls if "checked" in line]
    told = "at once" if any(c.startswith("checked") for c in calls) else "after a run of the code"
    own = f"{statistics.median(ours):.1f} | {statistics.median(ratios):.2f} | {min(ratios):.2f}"
    return f"| {name} | {' | '.join(words)} | {own} | {max(errors):.1e} | {told} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=f"{IMAGES},{SIGNALS}", help="separated by commas")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--count", type=int, default=12, help="sizes of each model")
    options = parser.parse_args()
    print(
        f"| {options.dtype} | first {FIRST} new sizes, ms | later ones | then, ms | stock / ours "
        "| least | error | new sizes |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with torch.no_grad():
        for name in options.models.split(","):
            print(row(name, getattr(torch, options.dtype), options.count), flush=True)


if __name__ == "__main__":
    main()
