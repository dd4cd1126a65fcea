"""Quantize an image CNN from float32 to 8-bit integers, and see what it costs in accuracy.

Trains a small residual network on handwritten digits (those of scikit-learn, or generated ones
where it is not installed), calibrates on a part of the training images, and prints accuracy, time
and file size of both models.

    python examples/quantize_cnn.py
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import oxytorch

EPILOG = """\
examples:
  python examples/quantize_cnn.py                        ten seconds on two cores
  python examples/quantize_cnn.py --images generated     without scikit-learn
  python examples/quantize_cnn.py --epochs 1             two seconds, a worse model
  python examples/quantize_cnn.py --save digits.oxy      also write the quantized model to a file

for a model of yours
  quantized = oxytorch.quantize(model.eval(), calibration_batches)   32 to 500 typical inputs
  print(oxytorch.quantization.report(model, quantized, held_out_batches))
docs/int8.md says how to get lost accuracy back: ranges, smoothing, autotune."""

SIZE = 16
"""Height and width of an image."""


@dataclass
class Digits:
    """Images [n, 1, SIZE, SIZE] from 0 to 1, and what they show, from 0 to 9."""

    source: str
    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def read_digits() -> Digits:
    """The 1797 scans of scikit-learn, 8 x 8 pixels, enlarged; the last 400 are held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    small = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    images = functional.interpolate(small, size=(SIZE, SIZE), mode="bilinear")
    labels = torch.tensor(found.target)
    source = f"{len(images)} scans of scikit-learn"
    return Digits(source, images[:-400], labels[:-400], images[-400:], labels[-400:])


_SEGMENTS = ("1110111", "0010010", "1011101", "1011011", "0111010",
             "1101011", "1101111", "1010010", "1111111", "1111011")  # fmt: skip
"""Of a seven-segment display, for 0 to 9: top, top left, top right, middle, ..., bottom."""
_BARS = ((1, 2, 2, 6), (2, 5, 1, 2), (2, 5, 6, 7), (5, 6, 2, 6), (6, 9, 1, 2), (6, 9, 6, 7),
         (9, 10, 2, 6))  # fmt: skip
"""Of each segment: first and last row, first and last column of an image of 12 x 8."""


def make_digits(count: int = 1800) -> Digits:
    """Digits of a display in random places and sizes, with noise; the last 400 are held out."""
    random = torch.Generator().manual_seed(0)
    glyphs = torch.zeros(10, 12, 8)
    for digit, segments in enumerate(_SEGMENTS):
        for is_on, (top, bottom, left, right) in zip(segments, _BARS, strict=True):
            glyphs[digit, top:bottom, left:right] += float(is_on)
    glyphs.clamp_(max=1)
    labels = torch.randint(10, (count,), generator=random)
    images = torch.zeros(count, 1, SIZE, SIZE)
    for image, label in zip(images, labels, strict=True):
        height, width = (int(torch.randint(8, 13, (1,), generator=random)) for _ in range(2))
        y, x = (int(torch.randint(SIZE - side, (1,), generator=random)) for side in (height, width))
        glyph = functional.interpolate(glyphs[label][None, None], size=(height, width))
        image[:, y : y + height, x : x + width] = glyph[0]
    images = (images + 0.2 * torch.randn(images.shape, generator=random)).clamp(0, 1)
    source = f"{count} generated digits"
    return Digits(source, images[:-400], labels[:-400], images[-400:], labels[-400:])


class Block(nn.Module):
    """Two convolutions with a way around them, at half the resolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.around = nn.Conv2d(inputs, outputs, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first_norm(self.first(x)).relu()
        return (self.second_norm(self.second(inner)) + self.around(x)).relu()


class SmallResidualNetwork(nn.Sequential):
    """Images to ten scores."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), Block(32, 64), Block(64, 128),
            Block(128, 256), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10),
        )  # fmt: skip


def train(model: nn.Module, digits: Digits, epochs: int) -> None:
    """Train in place; says after each epoch how it stands."""
    optimizer = torch.optim.AdamW(model.parameters())
    steps = epochs * len(torch.arange(len(digits.images)).split(64))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    begun = time.perf_counter()
    for epoch in range(1, epochs + 1):
        model.train()
        for rows in torch.randperm(len(digits.images)).split(64):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(digits.images[rows]), digits.labels[rows])
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        left = (time.perf_counter() - begun) / epoch * (epochs - epoch)
        right = accuracy(model, digits.test_images, digits.test_labels)
        print(
            f"epoch {epoch} of {epochs}: accuracy {right:.1%}, {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )


@torch.inference_mode()
def accuracy(model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> float:
    """The share of images whose digit has the highest score."""
    scores = torch.cat([model(part) for part in images.split(100)])
    return float((scores.argmax(1) == labels).float().mean())


@torch.inference_mode()
def times(models: Sequence[Callable[[Tensor], Tensor]], batch: Tensor, rounds: int) -> list[float]:
    """The median milliseconds of a call of each model; the models take turns."""
    found: list[list[float]] = [[] for _ in models]
    for _ in range(rounds + 1):
        for model, own in zip(models, found, strict=True):
            begun = time.perf_counter()
            model(batch)
            own.append((time.perf_counter() - begun) * 1000)
    return [statistics.median(own[1:]) for own in found]


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.rpartition("\n\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--images",
        choices=("scikit-learn", "generated"),
        help="where images come from (default: scikit-learn, where that is installed)",
    )
    parser.add_argument("--epochs", type=int, default=6, help="of training (default: 6)")
    parser.add_argument("--rounds", type=int, default=15, help="calls to time (default: 15)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the quantized model")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    torch.manual_seed(0)
    has_sklearn = importlib.util.find_spec("sklearn") is not None
    source = options.images or ("scikit-learn" if has_sklearn else "generated")
    if source == "scikit-learn" and not has_sklearn:
        print("--images: scikit-learn is not installed; pip install scikit-learn", file=sys.stderr)
        return 2
    digits = read_digits() if source == "scikit-learn" else make_digits()
    print(f"{digits.source}, 400 of them held out")
    model = SmallResidualNetwork()
    train(model, digits, options.epochs)

    # The two lines that this example is about.
    calibration_batches = digits.images[:512].split(64)
    quantized = oxytorch.quantize(model, calibration_batches)

    plain = oxytorch.optimize(model, sample_input=digits.images[:64], graph=True)
    report = oxytorch.quantization.report(model, quantized, digits.test_images.split(100))
    print(f"\n{report}\n")
    ways = {"float32": model, "float32, optimize": plain, "int8, quantize": quantized}
    milliseconds = times([*ways.values()], digits.test_images[:64], options.rounds)
    print(f"{'':20}{'accuracy':>10}{'64 images':>12}{'':>9}")
    for (name, way), own in zip(ways.items(), milliseconds, strict=True):
        right = accuracy(way, digits.test_images, digits.test_labels)
        print(f"{name:20}{right:>10.1%}{own:>9.2f} ms{milliseconds[0] / own:>8.2f}x")

    with tempfile.TemporaryDirectory() as folder:
        path = options.save or Path(folder) / "digits.oxy"
        oxytorch.save(quantized, path, sample_input=digits.images[:64])
        loaded = oxytorch.load(path)
        with torch.inference_mode():
            batch = digits.test_images[:64]
            same = torch.equal(loaded(batch), quantized(batch))
        weights = sum(value.nbytes for value in model.state_dict().values())
        print(
            f"\nfile: {path.stat().st_size / 2**20:.2f} MiB, float32 weights "
            f"{weights / 2**20:.2f} MiB; the same scores once loaded: {'yes' if same else 'no'}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
