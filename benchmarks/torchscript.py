"""Times modules of TorchScript, frozen and optimized, in turns.

    python benchmarks/torchscript.py [--only mlp lstm resnet bert] [--rounds 15]

Prints a table: least milliseconds of the frozen module and of the optimized one, and the median
ratio of turns. Weights are random; the largest difference of the answers is in the last column.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import oxytorch


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(y))
        y += self.shortcut(x)
        return torch.relu_(y)


def resnet() -> nn.Module:
    """A ResNet of 18 layers."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True)]
    sizes = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    sizes += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    blocks = [Block(*size) for size in sizes]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *blocks, *head)


class LoopLSTM(nn.Module):
    """A layer-normalized LSTM whose loop over time is TorchScript's."""

    def __init__(self, features: int = 128, hidden: int = 256) -> None:
        super().__init__()
        self.hidden = hidden
        self.of_input = nn.Linear(features, 4 * hidden)
        self.of_state = nn.Linear(hidden, 4 * hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.size(0), self.hidden, dtype=x.dtype)
        cell = state
        for step in range(x.size(1)):
            gates = self.of_input(x[:, step]) + self.of_state(state)
            take, keep, new, give = gates.chunk(4, 1)
            cell = torch.sigmoid(keep) * cell + torch.sigmoid(take) * torch.tanh(new)
            state = self.norm(torch.sigmoid(give) * torch.tanh(cell) + state)
        return state


def mlp() -> nn.Module:
    """A small perceptron."""
    layers = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.ReLU(), nn.LayerNorm(256)]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def bert() -> nn.Module:
    """BERT-base of transformers."""
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(return_dict=False))


def _tokens(batch: int) -> tuple[Tensor, ...]:
    return torch.randint(30_000, (batch, 128)), torch.ones(batch, 128, dtype=torch.int64)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]], bool]] = {
    "mlp": (mlp, lambda batch: (torch.randn(batch, 64),), True),
    "lstm": (LoopLSTM, lambda batch: (torch.randn(batch, 32, 128),), False),
    "resnet": (resnet, lambda batch: (torch.randn(batch, 3, 224, 224),), True),
    "bert": (bert, _tokens, True),
}
"""By name: the model, its inputs for a batch, and whether it is traced, not scripted."""


def _pair(name: str, dtype: torch.dtype, batch: int) -> tuple[Any, Any, tuple[Tensor, ...]]:
    make, inputs_of, is_traced = MODELS[name]
    torch.manual_seed(0)
    model = make().eval().to(dtype)
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs_of(batch))
    script = torch.jit.trace(model, inputs, strict=False) if is_traced else torch.jit.script(model)
    return torch.jit.freeze(script), oxytorch.optimize(script, sample_input=inputs), inputs


def _first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def _milliseconds(run: Callable[[], Any], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - began) / calls * 1e3


def compare(name: str, dtype: torch.dtype, batch: int, rounds: int) -> str:
    """A line of the table."""
    frozen, ours, inputs = _pair(name, dtype, batch)
    expected, found = _first(frozen(*inputs)), _first(ours(*inputs))
    difference = float((expected - found).abs().max() / expected.abs().max())
    runs = [lambda: frozen(*inputs), lambda: ours(*inputs)]
    for run in (*runs, *runs, *runs):
        run()
    calls = max(1, int(20 / _milliseconds(runs[0], 1)))
    turns = [[_milliseconds(run, calls) for run in runs] for _ in range(rounds)]
    before, after = (min(each) for each in zip(*turns, strict=True))
    ratio = statistics.median(b / a for a, b in turns)
    report = oxytorch.explain(ours)
    done = len(report.applied)
    kind = str(dtype).removeprefix("torch.")
    return (
        f"| {name} | {kind} | {batch} | {before:.3f} | {after:.3f} | {ratio:.2f} | {done} | "
        f"{difference:.0e} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=MODELS, default=[*MODELS])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("| model | dtype | batch | frozen, ms | optimized, ms | ratio | fused | difference |")
    print("|---|---|---|---|---|---|---|---|")
    kinds = itertools.product(options.only, (torch.float32, torch.bfloat16), (1, 8))
    with torch.no_grad():
        for name, dtype, batch in kinds:
            print(compare(name, dtype, batch, options.rounds), flush=True)


if __name__ == "__main__":
    main()
