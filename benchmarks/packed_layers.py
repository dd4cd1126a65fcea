"""What a call of one packed linear layer costs beside `nn.Linear`'s, on this machine.

    python benchmarks/packed_layers.py [--rows N] [--threads N]

Prints a row of Markdown for each dtype and size: microseconds of the stock layer and of the packed
one, by turns, and in which form the weight lies.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from oxytorch.graph.forward import with_parameters
from oxytorch.ops.linear import PackedLinearWeight
from oxytorch.optimize.passes.packed_layers import LinearForward

SIZES = ((64, 128), (128, 256), (256, 256), (512, 512))
ROUNDS, CALLS = 15, 300


def microseconds(call: Callable[[Tensor], Tensor], x: Tensor) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS):
        call(x)
    return (time.perf_counter() - begin) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1, help="rows of the input")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print("| dtype | layer | nn.Linear, us | panels, us | oneDNN's order, us |")
    print("|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for width, outputs in SIZES:
            stock = nn.Linear(width, outputs).to(dtype).eval()
            layers: list[nn.Module] = [stock]
            for in_panels in (True, False):
                weight = PackedLinearWeight(stock.weight.detach(), in_panels=in_panels)
                parameters = {**stock._parameters, "weight": weight.as_parameter(True)}
                layer = with_parameters(stock, parameters)
                vars(layer)["forward"] = LinearForward(layer)
                layers.append(layer)
            x = torch.randn(given.rows, width, dtype=dtype)
            with torch.inference_mode():
                rounds = [[microseconds(call, x) for call in layers] for _ in range(ROUNDS)]
            times = " | ".join(f"{min(column):.1f}" for column in zip(*rounds, strict=True))
            name = str(dtype).removeprefix("torch.")
            print(f"| {name} | {width} x {outputs} | {times} |", flush=True)


if __name__ == "__main__":
    main()
