"""What `oxytorch.compat` costs in a call: its models beside those of oxytorch's own functions.

    python benchmarks/compat_calls.py

Microseconds of a call, the two in turns: of the fastest turn of each, and quartiles of the
differences of neighbouring turns.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

import oxytorch
import oxytorch.compat.ipex as ipex


def small() -> tuple[nn.Module, Any]:
    """So small that a call is nothing but what surrounds the kernels."""
    return nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.randn(1, 64)


def language_model(kind: str, intermediate_size: int) -> tuple[nn.Module, Any]:
    """Four layers of a model of transformers by the name of its class."""
    model = getattr(transformers, kind)
    config = model.config_class(
        vocab_size=512, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=intermediate_size,
    )  # fmt: skip
    return model(config), torch.randint(512, (1, 32))


bert = partial(language_model, "BertModel", 1024)
llama = partial(language_model, "LlamaForCausalLM", 768)

Maker = Callable[[nn.Module, Any], Any]
BFLOAT16 = torch.bfloat16


def both(has_sample: bool, **options: Any) -> tuple[Maker, Maker]:
    """The `optimize` of both with the same arguments, and the input as the sample or without."""

    def maker(optimize: Callable[..., Any]) -> Maker:
        return lambda m, x: optimize(m, **options, **({"sample_input": x} if has_sample else {}))

    return maker(oxytorch.optimize), maker(ipex.optimize)


CASES: list[tuple[str, Callable[[], tuple[nn.Module, Any]], Maker, Maker]] = [
    ("small, float32", small, *both(False)),
    ("small, bfloat16", small, *both(False, dtype=BFLOAT16)),
    (
        "small, bfloat16, graph",
        small,
        lambda m, x: oxytorch.optimize(m, dtype=BFLOAT16, sample_input=x, graph=True),
        lambda m, x: ipex.optimize(m, dtype=BFLOAT16, sample_input=x, graph_mode=True),
    ),
    ("BERT of 4 layers, float32", bert, *both(True)),
    ("BERT of 4 layers, bfloat16", bert, *both(True, dtype=BFLOAT16)),
    (
        "Llama of 4 layers, bfloat16",
        llama,
        lambda m, x: oxytorch.llm.optimize(m),
        lambda m, x: ipex.llm.optimize(m, dtype=BFLOAT16),
    ),
]


def differences(own: Any, old: Any, x: Any, rounds: int, calls: int) -> tuple[list[float], ...]:
    """Microseconds of a call of each, in turns, and the paired differences."""
    found: tuple[list[float], list[float]] = ([], [])
    with torch.inference_mode():
        for _ in range(5):
            own(x)
            old(x)
        for number in range(rounds):
            turns = [(own, found[0]), (old, found[1])]
            for model, times in turns if number % 2 else reversed(turns):
                begun = time.perf_counter()
                for _ in range(calls):
                    model(x)
                times.append((time.perf_counter() - begun) / calls * 1e6)
    return *found, [b - a for a, b in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(
        f"torch {torch.__version__}, oxytorch {oxytorch.__version__}, level "
        f"{oxytorch.isa.active()}, {torch.get_num_threads()} threads"
    )
    print(f"{'a call, us':30}{'oxytorch':>10}{'compat':>10}{'apart':>8}   quartiles")
    for name, make, ours, theirs in CASES:
        torch.manual_seed(0)
        model, x = make()
        model.eval()
        pair = ours(copy.deepcopy(model), x), theirs(copy.deepcopy(model), x)
        calls = 50 if make is small else 2
        own, old, apart = differences(*pair, x, options.rounds, calls)
        low, middle, high = statistics.quantiles(apart)
        print(
            f"{name:30}{min(own):>10.1f}{min(old):>10.1f}{min(old) - min(own):>8.1f}"
            f"   {low:.1f}, {middle:.1f}, {high:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
