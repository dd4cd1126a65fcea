"""Language models from files in fresh processes: time to the first token beyond `import torch`, the
memory of four processes, and decoding beside the model that was saved.

python benchmarks/language_model_files.py [bf16 | int8 | int4] [--shape NAME] [--fresh | --decode]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from program_files import fresh

import oxytorch
from oxytorch import llm
from oxytorch.benchmark.llm.shapes import SHAPES, random_model

PROMPT, TURNS, TOKENS, RECORDED = 32, 7, 48, 16
"""Tokens of the prompt; turns; new tokens of each, and which of them come before a step is
recorded."""


def main() -> None:
    """Measure the formats that are named, or bf16 and int4."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="*", choices=("bf16", "int8", "int4"))
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama-1.1b")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--fresh", action="store_true", help="fresh processes alone")
    parts.add_argument("--decode", action="store_true", help="decoding alone")
    given = parser.parse_args()
    for name in given.formats or ("bf16", "int4"):
        model = random_model(given.shape)
        began = time.perf_counter()
        weights = None if name == "bf16" else name
        model = llm.optimize(model, weights=weights, inplace=True)
        optimized = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.oxy"
            oxytorch.save(model, path)
            saved = time.perf_counter() - optimized
            print(
                f"{given.shape}, {name}: optimized in {optimized - began:.1f} s, saved in "
                f"{saved:.1f} s, {path.stat().st_size / 1e6:.0f} MB",
                flush=True,
            )
            ids = torch.arange(PROMPT)[None] + 100
            if not given.decode:
                torch.save(ids, path.with_name("inputs"))
                call = "model.generate(inputs, max_new_tokens=1)"
                fresh(path, path.with_name("inputs"), call)
            if not given.fresh:
                _turns(model, path, ids)


def _turns(model: Any, path: Path, ids: torch.Tensor) -> None:
    """Milliseconds a token of each, in turns, after their steps were recorded."""
    ways = {
        "in memory": model,
        "from the file": oxytorch.load(path),
        "from a copy of it": oxytorch.load(path, shared=False),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    tokens = []
    for turn in range(TURNS + 1):
        for name, way in ways.items():
            moments, found = [], []
            for token in llm.stream(way, ids, max_new_tokens=TOKENS):
                moments.append(time.perf_counter())
                found.append(int(token))
            gaps = [after - before for before, after in pairwise(moments[RECORDED:])]
            tokens.append(found)
            if turn:
                times[name].append(statistics.median(gaps))
    assert all(found == tokens[0] for found in tokens), "other tokens"
    for name, found_times in times.items():
        middle, least = statistics.median(found_times), min(found_times)
        print(f"  a token, {name}: {middle * 1e3:.1f} ms, least {least * 1e3:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
