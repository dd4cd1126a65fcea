"""Train in bfloat16 with split weights: half the memory traffic, and no bit of a weight lost.

Trains the same network three times, from the same start and on the same batches: in float32, in
plain bfloat16 (`model.bfloat16()`), and in bfloat16 with split weights (`oxytorch.optimize`).
Prints what each has learned, how long a step takes, and the memory of weights and states.

    python examples/train_bfloat16.py
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

import oxytorch

EPILOG = """\
examples:
  python examples/train_bfloat16.py                  ten seconds on two cores
  python examples/train_bfloat16.py --width 2048     larger layers, a minute
  python examples/train_bfloat16.py --state int8     states of 8 bits too: half the memory

for a training of yours
  model, optimizer = oxytorch.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
and keep the rest as it is; checkpoints hold float32. docs/training.md says what a split weight is.
examples/train_character_model.py compares more ways on a language model, with several seeds."""

STATES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
LEARNING_RATE = 1e-4


def make_model(width: int) -> nn.Module:
    """Points of 32 numbers to 8 scores."""
    layers: list[nn.Module] = [nn.Linear(32, width), nn.GELU()]
    for _ in range(3):
        layers += [nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 8))


class Task:
    """Points whose class is what a fixed random network, the teacher, says."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(1)
        self.first = torch.randn(32, 12, generator=self.random) / 32**0.5
        self.second = torch.randn(12, 8, generator=self.random)

    def batch(self, rows: int) -> tuple[Tensor, Tensor]:
        points = torch.randn(rows, 32, generator=self.random)
        return points, ((2 * points @ self.first).tanh() @ self.second).argmax(1)


@dataclass
class Run:
    """One way to train. losses, seconds: of each step."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, points: Tensor, classes: Tensor) -> None:
        dtype = torch.bfloat16 if self.name == "bfloat16, plain" else points.dtype
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        scores = self.model(points.to(dtype)).float()
        loss = functional.cross_entropy(scores, classes)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - begun)
        self.losses.append(loss.item())

    @torch.no_grad()
    def accuracy(self, points: Tensor, classes: Tensor) -> float:
        """Of a stock float32 model that loads this one's checkpoint."""
        plain = make_model(self.model[0].out_features)
        plain.load_state_dict(self.model.state_dict())
        return float((plain(points).argmax(1) == classes).float().mean())

    def bytes_per_parameter(self) -> float:
        """Weights, all their bits, and states of the optimizer."""
        if isinstance(self.optimizer, oxytorch.optim.FusedOptimizer):
            return self.optimizer.memory_report()["total"]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        count = sum(p.numel() for p in parameters)
        states = [v for p in parameters for k, v in self.optimizer.state[p].items() if k != "step"]
        return sum(value.nbytes for value in [*parameters, *states]) / count


def ways(width: int, state: torch.dtype) -> list[Run]:
    """Three runs with the same weights."""
    start = make_model(width)
    runs = []

    model = copy.deepcopy(start)
    runs.append(Run("float32", model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)))

    model = copy.deepcopy(start).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    runs.append(Run("bfloat16, plain", model, optimizer))

    # What this example is about. torch.optim.AdamW serves as well, where states stay float32.
    model = copy.deepcopy(start)
    ours = oxytorch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, state_dtype=state)
    model, ours = oxytorch.optimize(model, optimizer=ours, dtype=torch.bfloat16)
    runs.append(Run("bfloat16, split", model, ours))
    return runs


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.rpartition("\n\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=300, help="of each run (default: 300)")
    parser.add_argument("--width", type=int, default=512, help="of the layers (default: 512)")
    parser.add_argument("--batch", type=int, default=256, help="points of a step (default: 256)")
    parser.add_argument(
        "--state", choices=STATES, default="float32", help="dtype of AdamW's states"
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    torch.manual_seed(0)
    task = Task()
    held_out = task.batch(4096)
    runs = ways(options.width, STATES[options.state])
    begun = time.perf_counter()
    for step in range(1, options.steps + 1):
        batch = task.batch(options.batch)
        for run in runs if step % 2 else reversed(runs):  # in turns, for the times
            run.step(*batch)
        if step % max(1, options.steps // 10) == 0:
            left = (time.perf_counter() - begun) / step * (options.steps - step)
            losses = ", ".join(f"{run.losses[-1]:.3f}" for run in runs)
            told = f"step {step} of {options.steps}, {left:.0f} s left, losses {losses}"
            print(told, file=sys.stderr, flush=True)

    print(f"{'':17}{'last losses':>13}{'accuracy':>11}{'a step':>12}{'bytes a weight':>17}")
    for run in runs:
        loss = statistics.fmean(run.losses[-10:])
        step_ms = statistics.median(run.seconds[1:]) * 1000
        print(
            f"{run.name:17}{loss:>13.4f}{run.accuracy(*held_out):>11.1%}{step_ms:>9.1f} ms"
            f"{run.bytes_per_parameter():>17.2f}"
        )
    split = runs[-1].model
    weight = split[0].weight
    print(
        f"\nthe split model's weight is {weight.dtype} to its layer; its checkpoint holds "
        f"{split.state_dict()['0.weight'].dtype}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
