"""Times the first call of sizes that a program has not seen beside later calls of the same size.

    python benchmarks/new_sizes.py [bert|gpt2|resnet50|mobilenet_v2] [--dtype bfloat16] [--calls N]

A model is optimized and called with small sizes until its program serves new ones without a
recording. Then sizes that are new come in a series, each series in a process of its own; each is
called once, and then N more times. A line has milliseconds of the first call, the median of the
later ones, their ratio, and the page faults of both.
"""

from __future__ import annotations

import argparse
import mmap
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import oxytorch

Size = tuple[int, ...]

TEXTS: dict[str, list[Size]] = {
    "growing": [(1, 24), (1, 65), (1, 130), (1, 260), (1, 500)],
    "shrinking": [(1, 500), (1, 260), (1, 130), (1, 65), (1, 24)],
    "batches": [(2, 64), (8, 64), (3, 64), (8, 100)],
}
IMAGES: dict[str, list[Size]] = {
    "growing": [(5,), (7,), (10,), (16,)],
    "shrinking": [(16,), (10,), (7,), (5,)],
    "batches": [(5,), (8,), (6,), (9,)],
}
PROOF: dict[bool, list[Size]] = {
    True: [(1, 8), (1, 9), (1, 11), (2, 9), (3, 11), (4, 12)],
    False: [(2,), (3,), (4,)],
}
"""Sizes at which programs are recorded and proven: of one text, of several, and of images."""
MODELS = ("bert", "gpt2", "resnet50", "mobilenet_v2")


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "bert":
        return transformers.BertModel(transformers.BertConfig()).eval()
    if name == "gpt2":
        return transformers.GPT2Model(transformers.GPT2Config(use_cache=False)).eval()
    if name == "resnet50":
        return transformers.ResNetForImageClassification(transformers.ResNetConfig()).eval()
    return transformers.MobileNetV2ForImageClassification(transformers.MobileNetV2Config()).eval()


def _inputs(size: Size, dtype: torch.dtype) -> tuple[Tensor, ...]:
    if len(size) == 1:
        return (torch.randn(*size, 3, 224, 224).to(dtype),)
    return (torch.randint(0, 30000, size),)


def _timed(model: nn.Module, given: tuple[Tensor, ...]) -> tuple[float, int]:
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    began = time.perf_counter()
    model(*given)
    taken = (time.perf_counter() - began) * 1e3
    return taken, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults


def _ready_memory(megabytes: int) -> None:
    """Has the system hold memory that nobody uses: a virtual machine whose host takes such memory
    back waits for it 10 to 50 times as long as for zeros in its own."""
    size = megabytes << 20
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, size, flags=private) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, mmap.PAGESIZE):
            memory[at] = 1


def measured(name: str, series: str, dtype: torch.dtype, calls: int, ready: int) -> None:
    """Prints a line for each size of a series."""
    sizes = (TEXTS if name in MODELS[:2] else IMAGES)[series]
    proof = PROOF[len(sizes[0]) == 2]
    options: Any = {"dtype": dtype} if dtype != torch.float32 else {}
    sample = _inputs(proof[0], torch.float32)
    model = oxytorch.optimize(
        _model(name), sample_input=sample, graph=True, passes=["program"], **options
    )
    for size in proof * 3:
        model(*_inputs(size, torch.float32))
    for size in sizes:
        given = _inputs(size, torch.float32)
        if ready:
            _ready_memory(ready)
        first, faults = _timed(model, given)
        later = [_timed(model, given) for _ in range(calls)]
        median, usual = map(statistics.median, zip(*later, strict=True))
        print(
            f"{name} {series} {'x'.join(map(str, size))}: first {first:.2f}, later {median:.2f} "
            f"({first / median:.2f}); faults {faults}, {usual:.0f}",
            flush=True,
        )
    print("\n".join(f"  {line}" for line in oxytorch.explain(model).calls), flush=True)


def main() -> None:
    """Measures the models that are named, each series of sizes in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=[*MODELS], metavar="MODEL", help=str(MODELS))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--series", choices=tuple(TEXTS), help="one alone, in this process")
    parser.add_argument("--calls", type=int, default=7, help="later calls (default: 7)")
    parser.add_argument("--ready", type=int, default=0, metavar="MB", help="memory to have ready")
    arguments = parser.parse_args()
    for name in arguments.models:
        if arguments.series:
            with torch.inference_mode():
                dtype = getattr(torch, arguments.dtype)
                measured(name, arguments.series, dtype, arguments.calls, arguments.ready)
            continue
        for series in TEXTS:
            command = [sys.executable, __file__, name, "--series", series]
            more = ["--dtype", arguments.dtype, "--calls", str(arguments.calls)]
            more += ["--ready", str(arguments.ready)]
            subprocess.run([*command, *more], check=True)


if __name__ == "__main__":
    main()
