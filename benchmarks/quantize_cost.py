"""Time and memory of `oxytorch.quantize` with BERT-base: calibration with 32 samples, conversion.

    python benchmarks/quantize_cost.py [--samples 32] [--tokens 128] [--dtype bfloat16] [--inplace]

Memory is the largest that the process took while it quantized, without what it had before besides
the model: the model counts once. The weights are random; nothing depends on their values.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

import oxytorch
from oxytorch.benchmark.models.cases import CASES, VOCABULARY


def main() -> None:
    """Measures and prints a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=32, help="of calibration (default: 32)")
    parser.add_argument("--tokens", type=int, default=128, help="of a sample (default: 128)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--inplace", action="store_true", help="change the model itself")
    options = parser.parse_args()
    model, inputs = CASES["bert"].build(1)
    assert isinstance(inputs, dict)
    shape = 1, options.tokens
    data = [
        {
            "input_ids": torch.randint(3, VOCABULARY, shape),
            "attention_mask": torch.ones(shape, dtype=torch.int64),
            "token_type_ids": torch.zeros(shape, dtype=torch.int64),
        }
        for _ in range(options.samples)
    ]
    with torch.inference_mode():
        model(**data[0])
    size = sum(parameter.nbytes for parameter in model.parameters())
    Path("/proc/self/clear_refs").write_text("5")  # resets the largest size
    before = _kilobytes("VmRSS")
    began = time.perf_counter()
    narrow = None if options.dtype == "float32" else torch.bfloat16
    quantized = oxytorch.quantize(model, data, dtype=narrow, inplace=options.inplace, progress=True)
    seconds = time.perf_counter() - began
    more = (_kilobytes("VmHWM") - before) * 1024
    with torch.inference_mode():
        quantized(**data[0])
    print(
        f"{oxytorch.isa.active()}, {torch.get_num_threads()} threads, torch {torch.__version__}: "
        f"BERT-base, {options.samples} samples of {options.tokens} tokens, {options.dtype}: "
        f"{seconds:.1f} s, {size / 1e6:.0f} MB of the model and {more / 1e6:.0f} MB more, "
        f"{(size + more) / size:.2f} x the model"
    )


def _kilobytes(name: str) -> int:
    """A size of the process, as Linux tells it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"expected {name} in /proc/self/status")


if __name__ == "__main__":
    sys.exit(main())
