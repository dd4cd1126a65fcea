"""Convolutions by the operators of oxytorch and by oneDNN's, layer by layer, in turns.

    python benchmarks/convolution_layers.py --dtype bfloat16 --threads 1

Each line has the least time of each way and its rate. Weights change from call to call, so that no
nearest cache holds them, as in a model. Set MALLOC_MMAP_MAX_=0 and
MALLOC_TRIM_THRESHOLD_=100000000000, so that nobody waits for page faults.
"""

from __future__ import annotations

import argparse
import time

import torch

import oxytorch
from oxytorch.program.passes.convolution_times import Convolution, Ways

# Channels, outputs, kernel, size of the image, stride, groups.
RESNET = (
    (3, 64, 7, 224, 2, 1),
    (64, 64, 3, 56, 1, 1),
    (64, 256, 1, 56, 1, 1),
    (256, 64, 1, 56, 1, 1),
    (128, 128, 3, 56, 2, 1),
    (256, 512, 1, 56, 2, 1),
    (128, 128, 3, 28, 1, 1),
    (128, 512, 1, 28, 1, 1),
    (512, 1024, 1, 28, 2, 1),
    (256, 256, 3, 14, 1, 1),
    (1024, 256, 1, 14, 1, 1),
    (1024, 2048, 1, 14, 2, 1),
    (512, 512, 3, 7, 1, 1),
)
DEPTHWISE = tuple(
    (channels, channels, kernel, size, stride, channels)
    for channels, kernel, size, stride in (
        (32, 3, 112, 1),
        (96, 3, 112, 2),
        (144, 3, 56, 1),
        (384, 3, 14, 1),
        (960, 3, 7, 1),
        (240, 5, 28, 1),
        (672, 5, 14, 1),
        (96, 7, 56, 1),
        (384, 7, 14, 1),
        (768, 7, 7, 1),
    )
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"level {oxytorch.isa.active()}, {options.dtype}, {options.threads} threads")
    with torch.inference_mode():
        for layer in (*RESNET, *DEPTHWISE):
            _time(layer, options.batch, getattr(torch, options.dtype), options.rounds)


def _time(layer: tuple[int, ...], batch: int, dtype: torch.dtype, rounds: int) -> None:
    inputs, outputs, kernel, size, stride, groups = layer
    call = Convolution(
        (batch, inputs, size, size),
        (outputs, inputs // groups, kernel, kernel),
        dtype,
        (stride, stride),
        (kernel // 2, kernel // 2),
        (1, 1),
        groups,
    )
    operations = 2 * call.result.numel() * inputs // groups * kernel**2
    ways, least = Ways(call), dict.fromkeys(("own", "packed"), float("inf"))
    for _ in range(rounds):
        for name in least:
            start = time.perf_counter()
            getattr(ways, name)()
            least[name] = min(least[name], time.perf_counter() - start)
    kind = "depthwise" if groups > 1 else f"to {outputs}"
    times = "  ".join(
        f"{name} {seconds * 1e6:7.1f} us {operations / seconds / 1e9:6.0f} GFLOP/s"
        for name, seconds in least.items()
    )
    print(f"{inputs:5} {kind:10} {kernel}x{kernel} of {size:3}, stride {stride}  {times}")


if __name__ == "__main__":
    main()
