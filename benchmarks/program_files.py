"""Saved programs in fresh processes: time to the first result beyond `import torch`, the first call
beside the second, speed beside the program in memory, and the memory of four processes.

python benchmarks/program_files.py [bert | resnet] [float32 | bfloat16]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

RUNS, PROCESSES, TURNS = 7, 4, 15
FRESH = """
import sys, time
import torch
inputs = torch.load(sys.argv[2])
began = time.perf_counter()
import oxytorch
model = oxytorch.load(sys.argv[1])
loaded = time.perf_counter()
{call}
first = time.perf_counter()
{call}
print(loaded - began, first - began, first - loaded, time.perf_counter() - first, flush=True)
if sys.stdin.readline():  # all others have run
    size, is_ours = {}, False
    for line in open("/proc/self/smaps"):
        name, *words = line.split()
        if not name.endswith(":"):
            is_ours = line.rstrip().endswith(sys.argv[1])
        elif is_ours and words[0].isdigit():
            size[name] = size.get(name, 0) + int(words[0])
    print(size["Rss:"], size["Pss:"], size["Anonymous:"], flush=True)
    sys.stdin.readline()  # and have looked
"""
PARTS = ("import and load", "to the first result", "first call", "second call")


def _bert() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BertConfig, BertModel

    ids = torch.arange(128).reshape(1, 128)
    return BertModel(BertConfig()), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ResNetConfig, ResNetModel

    return ResNetModel(ResNetConfig()), {"pixel_values": torch.rand(1, 3, 224, 224)}


MODELS: Mapping[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "bert": _bert,
    "resnet": _resnet,
}


def main() -> None:
    """Measure the models and dtypes that are named, or all."""
    words = sys.argv[1:]
    for name in [each for each in MODELS if each in words] or MODELS:
        for dtype in [d for d in ("float32", "bfloat16") if d in words] or ["float32", "bfloat16"]:
            model, inputs = MODELS[name]()
            model = model.eval().to(getattr(torch, dtype))
            inputs = {
                k: x.to(model.dtype) if x.is_floating_point() else x for k, x in inputs.items()
            }
            print(f"{name}, {dtype}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                _measure(model, inputs, Path(folder) / "model.oxy")


def _measure(model: nn.Module, inputs: dict[str, Tensor], path: Path) -> None:
    import oxytorch

    began = time.perf_counter()
    oxytorch.save(model, path, sample_input=inputs)
    megabytes = path.stat().st_size / 1e6
    print(f"  saved in {time.perf_counter() - began:.1f} s, {megabytes:.0f} MB", flush=True)
    given = path.with_name("inputs")
    torch.save(inputs, given)
    fresh(path, given, "model(**inputs)")
    with torch.no_grad():
        exported = torch.export.export(model, (), inputs)
        own = oxytorch.optimize(model, sample_input=inputs, graph=True)
    _turns(
        {
            "stock": model,
            "optimize(model, graph=True)": own,
            "optimize(exported)": oxytorch.optimize(exported),
            "loaded": oxytorch.load(path),
        },
        inputs,
    )


def fresh(path: Path, given: Path, call: str) -> None:
    """Times of `model` from a file in fresh processes, and what several hold of it together.

    given: a file with its `inputs`. call: the code of a call.
    """
    code = FRESH.replace("{call}", call)
    command = [sys.executable, "-c", code, str(path), str(given)]
    runs = []
    for _ in range(RUNS):
        done = subprocess.run(command, check=True, capture_output=True, text=True, input="")
        runs.append([float(word) for word in done.stdout.split()])
    for part, times in zip(PARTS, zip(*runs, strict=True), strict=True):
        print(f"  {part}: {statistics.median(times):.3f} s, least {min(times):.3f} s", flush=True)
    _memory(command, path.stat().st_size / 1e6)


def _memory(command: list[str], megabytes: float) -> None:
    """What processes that have the file open at once hold of it."""
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(PROCESSES)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    found = []
    for process in processes:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("look\n")
        process.stdin.flush()
        found.append([int(word) for word in process.stdout.readline().split()])
    for process in processes:
        process.communicate("done\n")
    rss, pss, written = (sum(each) / 1e3 for each in zip(*found, strict=True))
    print(
        f"  {PROCESSES} processes: {rss:.0f} MB of {megabytes:.0f} are seen by all together, "
        f"{pss:.0f} MB held, {written:.0f} MB written",
        flush=True,
    )


def _turns(ways: dict[str, Callable[..., Any]], inputs: dict[str, Tensor]) -> None:
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for turn in range(TURNS + 2):
            for name, run in ways.items():
                began = time.perf_counter()
                run(**inputs)
                if turn > 1:
                    times[name].append(time.perf_counter() - began)
    for name, found in times.items():
        print(f"  {name}: {statistics.median(found) * 1e3:.1f} ms, least {min(found) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
