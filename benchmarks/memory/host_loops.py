"""CPU inference loops with large short-lived tensors, and small ones, under several allocators.

    python benchmarks/memory/host_loops.py --jemalloc libjemalloc.so.2 --tcmalloc libtcmalloc.so.4

Each loop runs in a process of its own with the C library's malloc ("default"), with
`oxytorch.memory.use("cpu")` ("ours") and with the libraries given, in turns. Prints for each the
median and the least milliseconds of a call over all turns, and of the median turn page faults and
milliseconds in the kernel; then the quotient of the medians to that of "default".
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loop = Callable[[], Callable[[], Tensor]]
LOOPS: dict[str, Loop] = {}


def loop(make: Loop) -> Loop:
    LOOPS[make.__name__] = make
    return make


@loop
def images() -> Callable[[], Tensor]:
    """Eight images of 1920 x 1080 pixels are made ready: colours, brightness, size."""
    pixels = torch.randint(0, 256, (8, 3, 1080, 1920), dtype=torch.uint8)
    mean, deviation = torch.rand(3, 1, 1), torch.rand(3, 1, 1) + 0.5

    def call() -> Tensor:
        x = pixels.float() / 255
        x = torch.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2)
        grey = x.mean(1, keepdim=True)
        x = (grey + 1.2 * (x - grey)).clamp(0, 1)
        return F.interpolate((x - mean) / deviation, size=(540, 960), mode="bilinear")

    return call


@loop
def masks() -> Callable[[], Tensor]:
    """Segmentation of four images: logits of 21 classes become masks of 1024 x 1024."""
    logits = torch.randn(4, 21, 256, 256)

    def call() -> Tensor:
        x = F.interpolate(logits, size=(1024, 1024), mode="bilinear")
        likely, found = x.softmax(1).max(1)
        return torch.where(likely > 0.5, found, -1)

    return call


@loop
def scores() -> Callable[[], Tensor]:
    """Attention as it is written out: 12 heads over 1536 positions, with a bias."""
    q, k, v = (torch.randn(1, 12, 1536, 64) for _ in range(3))
    bias = torch.randn(1, 12, 1536, 1536)
    return lambda: torch.softmax(q @ k.transpose(-1, -2) / 8 + bias, -1) @ v


@loop
def likelihoods() -> Callable[[], Tensor]:
    """A language model's last layer scores texts: 1024 tokens out of 32000."""
    states, weight = torch.randn(1024, 256), torch.randn(32000, 256)
    wanted = torch.randint(32000, (1024, 1))
    return lambda: F.log_softmax(states @ weight.T, -1).gather(1, wanted).sum()


@loop
def sound() -> Callable[[], Tensor]:
    """Spectra of sixteen minutes of sound in 80 bands."""
    samples, bands = torch.randn(16, 16000 * 60), torch.rand(80, 201)
    window = torch.hann_window(400)

    def call() -> Tensor:
        x = torch.stft(samples, 400, 160, window=window, return_complex=True).abs().square()
        return (bands @ x).clamp(min=1e-10).log10()

    return call


class UNet(nn.Module):
    """Three levels with skips."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.down = nn.ModuleList(
            self.block(a, b) for a, b in zip([width, *sizes], sizes, strict=False)
        )
        self.up = nn.ModuleList(
            self.block(a + b, b) for a, b in ((4 * width, 2 * width), (2 * width, width))
        )
        self.last = nn.Conv2d(width, 4, 3, padding=1)

    @staticmethod
    def block(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = F.interpolate(kept.pop(), scale_factor=1.0)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return self.last(x)


@loop
def unet() -> Callable[[], Tensor]:
    """A U-Net over two images of 768 x 768."""
    net, x = UNet(16).eval(), torch.randn(2, 4, 768, 768)
    return lambda: net(x)


@loop
def diffusion() -> Callable[[], Tensor]:
    """A step of diffusion with guidance, 512 x 512: two answers of the network, and the update."""
    net, x = UNet(32).eval(), torch.randn(1, 4, 512, 512)

    def call() -> Tensor:
        free, led = net(torch.cat([x, x])).chunk(2)
        noise = free + 7.5 * (led - free)
        start = (x - 0.6 * noise) / 0.8
        return 0.9 * start.clamp(-1, 1) + 0.43 * noise + 0.1 * torch.randn_like(x)

    return call


@loop
def feed_forward() -> Callable[[], Tensor]:
    """Four feed-forward parts of a transformer over 4096 tokens: arithmetic, above all."""
    d = 1024
    parts = [
        nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        for _ in range(4)
    ]
    net, x = nn.Sequential(*parts).eval(), torch.randn(4096, d)
    return lambda: net(x)


@loop
def small_perceptron() -> Callable[[], Tensor]:
    """Tensors of some KiB: 256 calls of a network."""
    net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).eval()
    x = torch.randn(8, 256)

    def call() -> Tensor:
        y = x
        for _ in range(256):
            y = net(y)
        return y

    return call


@loop
def small_transformer() -> Callable[[], Tensor]:
    """Four layers of 256 over one sentence of 64 tokens: tensors below 1 MiB."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    net = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
    x = torch.randn(1, 64, 256)
    return lambda: net(x)


@loop
def small_convolutions() -> Callable[[], Tensor]:
    """Eight convolutions over one image of 56 x 56: tensors of 0.8 MiB."""
    parts = [m for _ in range(8) for m in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())]
    net, x = nn.Sequential(*parts).eval(), torch.randn(1, 64, 56, 56)
    return lambda: net(x)


@loop
def around_the_border() -> Callable[[], Tensor]:
    """Tensors of 0.5 to 2 MiB in turns: on both sides of the size from which ours serves."""
    inputs = [torch.randn(1 << bits) for bits in (17, 18, 19)]
    return lambda: torch.stack([((x + 1) * 2).relu().sum() for x in inputs * 20])


def measure(name: str, ours: bool, seconds: float) -> dict[str, Any]:
    if ours:
        from oxytorch import memory

        memory.use("cpu")
    torch.manual_seed(0)
    with torch.inference_mode():
        call = LOOPS[name]()
        for _ in range(3):
            total = float(call().double().sum())
        times: list[float] = []
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        while len(times) < 4 or time.perf_counter() - began < seconds:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "times": times,
        "faults": (after.ru_minflt - before.ru_minflt) / len(times),
        "kernel": (after.ru_stime - before.ru_stime) * 1e3 / len(times),
        "peak": after.ru_maxrss / 1024,
        "sum": total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", help=f"of {', '.join(LOOPS)}, with commas")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each process' calls")
    parser.add_argument("--jemalloc", help="its library")
    parser.add_argument("--tcmalloc", help="its library")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        name, allocator = given.child.split("/")
        print(json.dumps(measure(name, allocator == "ours", given.seconds)))
        return
    preloads = {"default": "", "ours": "", "jemalloc": given.jemalloc, "tcmalloc": given.tcmalloc}
    preloads = {name: path for name, path in preloads.items() if path is not None}
    names = given.only.split(",") if given.only else list(LOOPS)
    if unknown := [name for name in names if name not in LOOPS]:
        parser.error(f"--only: expected some of {', '.join(LOOPS)}, got {unknown[0]!r}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    for name in names:
        found: dict[str, list[dict[str, Any]]] = {each: [] for each in preloads}
        for _ in range(given.turns):
            for allocator, preload in preloads.items():
                command = [sys.executable, __file__, "--child", f"{name}/{allocator}"]
                command += ["--seconds", str(given.seconds)]
                environment = {**os.environ, **({"LD_PRELOAD": preload} if preload else {})}
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=True
                )
                found[allocator].append(json.loads(done.stdout.splitlines()[-1]))
        sums = [each["sum"] for runs in found.values() for each in runs]
        same = "" if max(sums) - min(sums) <= 1e-6 * max(1.0, *map(abs, sums)) else "  SUMS DIFFER"
        base = 0.0
        for allocator, runs in found.items():
            times = [time for each in runs for time in each["times"]]
            middle = statistics.median(times)
            base = base or middle
            kept = sorted(runs, key=lambda each: each["faults"])[len(runs) // 2]
            print(
                f"{name:20}{allocator:10}{middle:9.2f} ms, least {min(times):9.2f}, "
                f"faults {kept['faults']:9.0f}, kernel {kept['kernel']:8.2f} ms, "
                f"peak {kept['peak']:6.0f} MiB, {base / middle:5.2f} x{same}",
                flush=True,
            )


if __name__ == "__main__":
    main()
