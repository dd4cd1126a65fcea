"""What the checks of sources cost in a call of BERT-base (128 tokens), on this machine.

    python benchmarks/guards.py [--rounds N]

Prints a row of Markdown for each way of `oxytorch.optimize` and dtype: the time of a call, checks
of a call, places that they look at, microseconds of all of them in a call, between which the
model's weights sweep the caches, and when they run one after the other; and what timing them takes
of the former.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import oxytorch
from oxytorch.core.sources import Places

TOKENS = 128


def in_calls(call: Callable[[], Any], check: Callable[[Places], bool], rounds: int) -> list[float]:
    """Microseconds of all checks of a call: medians, for each check."""
    times: list[float] = []

    def timed(places: Places) -> bool:
        begin = time.perf_counter()
        found = check(places)
        times.append((time.perf_counter() - begin) * 1e6)
        return found

    rows = []
    before = Places.are_current
    Places.are_current = timed  # type: ignore[method-assign]
    try:
        for _ in range(rounds):
            times.clear()
            call()
            rows.append([*times])
    finally:
        Places.are_current = before  # type: ignore[method-assign]
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def places_of(call: Callable[[], Any]) -> list[Places]:
    seen: dict[int, Places] = {}
    before = Places.are_current

    def noted(places: Places) -> bool:
        seen[id(places)] = places
        return before(places)

    Places.are_current = noted  # type: ignore[method-assign]
    try:
        call()
    finally:
        Places.are_current = before  # type: ignore[method-assign]
    return [*seen.values()]


def median_time(call: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="calls that are timed")
    rounds = parser.parse_args().rounds
    model = transformers.BertModel(transformers.BertConfig()).eval()
    x = torch.randint(0, model.config.vocab_size, (1, TOKENS))
    print(
        "| way | dtype | call, ms | checks | places | in a call, us | in a row, us | timing, us |"
    )
    print("|---|---|---|---|---|---|---|---|")
    check = Places.are_current
    for graph in (True, False):
        for dtype in (torch.float32, torch.bfloat16):
            fast = oxytorch.optimize(model, sample_input=x, graph=graph, dtype=dtype)

            def call(fast: Any = fast) -> None:
                with torch.no_grad():
                    fast(x)

            for _ in range(10):
                call()
            places = places_of(call)
            apart = in_calls(call, check, rounds)
            timing = in_calls(call, lambda _: True, rounds)
            row = median_time(lambda places=places: [check(each) for each in places], rounds)
            print(
                f"| {'program' if graph else 'sample'} | {str(dtype).removeprefix('torch.')} "
                f"| {median_time(call, rounds) / 1e3:.1f} | {len(apart)} | {sum(map(len, places))} "
                f"| {sum(apart):.1f} | {row:.1f} | {sum(timing):.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
