"""How long a kernel takes to get onto an NVIDIA GPU by each way, and to be launched.

python benchmarks/gpu_loading.py [--from DIR]     prints JSON; needs images (`oxytorch aot build`)

Each way is measured with an empty cache of its own, in this process, after CUDA is up.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from oxytorch import __version__, config
from oxytorch.gpu import cuda, images, launch
from oxytorch.gpu.kernel import Kernel, Signature
from oxytorch.ops.gpu_kernels import KERNELS


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="folder", type=Path, help="only the images in this folder")
    arguments = parser.parse_args()
    logging.getLogger("oxytorch.gpu").setLevel(logging.ERROR)
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    if arguments.folder is not None:
        images.folders = lambda: [arguments.folder]
    everything = [(kernel, signature) for kernel in KERNELS for signature in kernel.signatures()]
    some = everything[:: max(1, len(everything) // 12)]
    driver = cuda.driver(0)
    with tempfile.TemporaryDirectory() as cache:
        settings = dataclasses.replace(config.current, cache_home=cache)
        ways: dict[str, Any] = {"image": _load(settings, "aot", everything)}
        ways["ptx, first time"] = _load(settings, "jit", some)
        ways["ptx, kept in the cache"] = _load(settings, "jit", some)
    if importlib.util.find_spec("triton") is not None:
        from triton import knobs

        with tempfile.TemporaryDirectory() as cache, knobs.cache.scope():
            knobs.cache.dir = cache
            ways["triton, empty cache"] = _load(settings, "triton", some[:6])
    found = {
        "oxytorch": __version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(0),
        "device": driver.device,
        "driver": driver.version,
        "milliseconds_to_load": ways,
        "microseconds_to_launch": _launches(),
    }
    print(json.dumps(found, indent=1))


def _load(
    settings: config.Config, way: str, wanted: list[tuple[Kernel, Signature]]
) -> dict[str, float]:
    config.current = dataclasses.replace(settings, gpu=way)
    images.collection.cache_clear()
    images._changed.cache_clear()
    times = []
    for kernel, signature in wanted:
        launch._functions.clear()
        begin = time.perf_counter()
        launch.function(kernel, signature, torch.device("cuda", 0))
        times.append((time.perf_counter() - begin) * 1000)
    return {
        "kernels": len(times),
        "first": round(times[0], 3),
        "median": round(statistics.median(times), 3),
        "largest_after_first": round(max(times[1:]), 3),
        "together": round(sum(times), 1),
    }


def _launches() -> dict[str, float]:
    """Of one program of `squares` that has nothing to sum, next to torch's smallest kernel."""
    config.current = dataclasses.replace(config.current, gpu="")
    device = torch.device("cuda", 0)
    kernel = next(one for one in KERNELS if one.name == "squares")
    place = torch.zeros(1024, dtype=torch.float64, device=device)
    address = place.data_ptr()
    function = launch.function(kernel, kernel.signatures()[0], device)
    bound = function.bind(address, address, 0, address)
    stream = launch.current_stream(device)
    small = torch.zeros(1, device=device)

    actions: dict[str, Callable[[], object]] = {
        "bound(programs, stream)": lambda: bound(1, stream),
        "current_stream(device)": lambda: launch.current_stream(device),
        "torch small.zero_()": small.zero_,
    }
    return {name: round(_microseconds(action), 2) for name, action in actions.items()}


def _microseconds(action: Callable[[], object], repeats: int = 500) -> float:
    """The median over rounds that leave the queue of launches short."""
    rounds = []
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            action()
        rounds.append((time.perf_counter() - begin) / repeats * 1e6)
    torch.cuda.synchronize()
    return statistics.median(rounds)


if __name__ == "__main__":
    main()
