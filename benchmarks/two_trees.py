"""Times six short calls with two source trees in turns: whether a change left speed as it was.

python benchmarks/two_trees.py OLD NEW, two folders `src` with a built library each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 0.8
"""For which each call is repeated."""


def least(call: Callable[[], Any], burst: int = 20) -> float:
    """Seconds of a call: the least mean of bursts."""
    call()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(burst):
            call()
        best = min(best, (time.perf_counter() - begin) / burst)
    return best


def measure() -> dict[str, float]:
    """Seconds of each call, of the package that this process imports."""
    import torch
    from torch import nn

    begin = time.perf_counter()
    import oxytorch

    found = {"import oxytorch": time.perf_counter() - begin}
    from oxytorch.quantization import Int4Weight

    torch.manual_seed(0)
    trained = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    optimizer = oxytorch.optim.AdamW(trained.parameters(), lr=1e-3)
    for parameter in trained.parameters():
        parameter.grad = torch.randn_like(parameter)
    found["AdamW step, 16 tensors"] = least(optimizer.step)
    layers = [nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.LayerNorm(256)]
    model, x = nn.Sequential(*layers).eval(), torch.randn(16, 256)
    with torch.inference_mode():
        fast = oxytorch.optimize(model, sample_input=x)
        found["optimize"] = least(lambda: fast(x))
        program = oxytorch.optimize(model, sample_input=x, graph=True)
        found["optimize, graph=True"] = least(lambda: program(x))
        small, row = nn.Sequential(nn.Linear(512, 512)).eval(), torch.randn(1, 512)
        oxytorch.quantize_(small, Int4Weight())
        found["int4 linear, one row"] = least(lambda: small(row), burst=100)
        integers = oxytorch.quantize(model, [torch.randn(16, 256) for _ in range(8)])
        found["quantize"] = least(lambda: integers(x))
    return found


def run(tree: Path) -> dict[str, float]:
    """`measure` in a process of its own, which imports the tree's package."""
    rest = [path for path in sys.path if path and not (Path(path) / "oxytorch").is_dir()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), *rest])}
    command = [sys.executable, __file__, "--one"]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", nargs="*", type=Path, metavar="SRC", help="OLD and NEW")
    parser.add_argument("--turns", type=int, default=6, help="(default: 6)")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure()))
        return
    if len(arguments.trees) != 2:
        parser.error("expected two folders")
    found: list[list[dict[str, float]]] = [[], []]
    for turn in range(arguments.turns):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            found[which].append(run(arguments.trees[which].resolve()))
    for name in found[0][0]:
        old, new = (statistics.median(each[name] for each in side) * 1e6 for side in found)
        print(f"{name:24} old {old:9.1f} us   new {new:9.1f} us   new / old {new / old:.3f}")


if __name__ == "__main__":
    main()
