"""How long it takes to quantize a language model, to save it, to load it, and to read it once.

python benchmarks/quantized_files.py [--shape NAME]     prints a table; needs oxytorch[llm]

Loading is measured in this process, after the model's class was imported, from files that the
system has in memory. "read" is a product of one row with every weight, the best of seven.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import oxytorch
from oxytorch.benchmark.llm.shapes import SHAPES, random_model
from oxytorch.ops.linear_panels import linear
from oxytorch.ops.panels import PanelWeight
from oxytorch.quantization import Int4Weight, Int8Weight, NF4Weight

LAYERS = ["model.layers", "lm_head"]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama-1.1b")
    arguments = parser.parse_args()
    print(f"{arguments.shape}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| weights | file | quantize | save | load | unchecked | read | copied | read |")
    print("|---|---|---|---|---|---|---|---|---|")
    for config in (Int8Weight(), Int4Weight(), NF4Weight()):
        print(f"| {_row(arguments.shape, config)} |", flush=True)


def _row(shape: str, config: Any) -> str:
    model = random_model(shape)
    quantized = _seconds(lambda: oxytorch.quantize_(model, config, filter=LAYERS))
    with tempfile.TemporaryDirectory() as directory:
        saved = _seconds(lambda: oxytorch.save_quantized(model, directory))
        size = (Path(directory) / "oxytorch.safetensors").stat().st_size
        oxytorch.load_quantized(directory)
        loaded, unchecked = (
            statistics.median(
                _seconds(lambda v=verify: oxytorch.load_quantized(directory, verify=v))
                for _ in range(5)
            )
            for verify in (True, False)
        )
        mapped = _bandwidth(oxytorch.load_quantized(directory))
        copied = _seconds(lambda: oxytorch.load_quantized(directory, shared=False))
        placed = _bandwidth(oxytorch.load_quantized(directory, shared=False))
    cells = [type(config).__name__, f"{size / 2**20:.0f} MiB"]
    cells += [f"{value:.2f} s" for value in (quantized, saved, loaded, unchecked)]
    cells += [f"{mapped:.1f} GB/s", f"{copied:.2f} s", f"{placed:.1f} GB/s"]
    return " | ".join(cells)


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


@torch.no_grad()
def _bandwidth(model: torch.nn.Module) -> float:
    """GB/s at which a token's products read the packed weights."""
    weights = [
        weight
        for module in model.modules()
        if isinstance(weight := getattr(module, "weight", None), PanelWeight)
    ]
    rows = {w.shape[1]: torch.randn(1, w.shape[1], dtype=torch.bfloat16) for w in weights}

    def sweep() -> None:
        for weight in weights:
            linear(rows[weight.shape[1]], weight)

    best = min(_seconds(sweep) for _ in range(7))
    return sum(weight.nbytes_packed() for weight in weights) / best / 1e9


if __name__ == "__main__":
    main()
