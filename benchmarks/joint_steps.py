"""A step of several sequences of a language model together: how long it takes by their number.

Weights are random, of a shape by name. "alike": whether each sequence has the very logits that it
has in a step of at most 8 of them.

    python benchmarks/joint_steps.py --weights int4 --rows 1,8,16,32
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import oxytorch
from oxytorch.benchmark.llm.shapes import random_model
from oxytorch.llm.cache import CacheSlots
from oxytorch.llm.joint_steps import joint_step
from oxytorch.llm.record import FusedModel, fused_model

EXACT = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--activations", choices=("int8",), help="(default: bfloat16)")
    parser.add_argument("--rows", default="1,8,16,32")
    parser.add_argument("--length", type=int, default=200, help="tokens that each has read")
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    torch.manual_seed(0)
    model = oxytorch.llm.optimize(
        random_model(given.shape),
        dtype=torch.bfloat16,
        weights=given.weights,
        activation_dtype=given.activations,
        inplace=True,
    )
    fused = fused_model(model)
    assert fused is not None
    with torch.inference_mode():
        measure(given, fused, model.config.vocab_size)


def measure(given: argparse.Namespace, fused: FusedModel, vocabulary: int) -> None:
    """Prints a line for each number of sequences."""
    counts = [int(each) for each in given.rows.split(",")]
    caches = fused.slots(max(counts), given.length + 256)
    prompts = torch.randint(vocabulary, (max(counts), given.length))
    for row, cache in enumerate(caches.slots):
        fused.step(prompts[row : row + 1], cache)
    form = given.weights + (f"-{given.activations}" if given.activations else "")
    print(f"| {form}: sequences | ms together | by {EXACT} | tokens/s | alike |")
    print("|---|---|---|---|---|")
    for rows in counts:
        tokens = torch.randint(vocabulary, (rows, 1))
        together, in_groups = [], []
        for _ in range(given.steps):
            begin = time.perf_counter()
            found = joint_step(fused, tokens, caches, range(rows))
            middle = time.perf_counter()
            crop(caches, given.length)
            between = time.perf_counter()
            parts = [
                joint_step(
                    fused,
                    tokens[start : start + EXACT],
                    caches,
                    range(start, min(rows, start + EXACT)),
                )
                for start in range(0, rows, EXACT)
            ]
            in_groups.append(time.perf_counter() - between)
            together.append(middle - begin)
            crop(caches, given.length)
        alike = torch.equal(found, torch.cat(parts))
        one, other = (statistics.median(times[2:]) * 1e3 for times in (together, in_groups))
        rate = rows / min(one, other) * 1e3
        print(f"| {rows} | {one:.1f} | {other:.1f} | {rate:.0f} | {alike} |", flush=True)


def crop(caches: CacheSlots, length: int) -> None:
    for cache in caches.slots:
        cache.crop(min(length, cache.length))


if __name__ == "__main__":
    main()
