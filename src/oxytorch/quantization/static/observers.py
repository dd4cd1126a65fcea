"""Ranges of values that calibration sees, and the bytes that stand for them.

An observer sees tensors one after the other, and tells the range [least, most] that bytes are to
cover; what lies beyond is clamped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...program.passes.quantized_layers import Numbers

BINS = 2048
"""Of a histogram."""
LEVELS = 256
"""Values of a byte."""
MOMENTUM = 0.01
"""The weight of the newest tensor in a moving average, as in torch.ao."""
PERCENTILE = 99.99
_STEPS, _ROUNDS = 64, 2
"""Places of an end that a search looks at, and how often it looks at each end."""


class Observer:
    """The least and the largest value of all tensors."""

    def __init__(self) -> None:
        self.least = math.inf
        self.most = -math.inf
        self.count = 0

    def see(self, values: Tensor) -> None:
        """Take notice of a tensor. Raises ValueError if it holds NaN or infinity."""
        if values.numel() == 0:
            return
        least, most = map(float, torch.aminmax(values.detach()))
        if not (math.isfinite(least) and math.isfinite(most)):
            raise ValueError("got NaN or infinity")
        self._note(values, least, most)
        self.count += 1

    def _note(self, values: Tensor, least: float, most: float) -> None:
        self.least, self.most = min(self.least, least), max(self.most, most)

    def range(self) -> tuple[float, float]:
        """The range that bytes are to cover."""
        return self.least, self.most


class MovingAverage(Observer):
    """Moving averages of the least and the largest values of each tensor.

    Source: Jacob et al., Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference, 2018.
    """

    def _note(self, values: Tensor, least: float, most: float) -> None:
        if self.count == 0:
            self.least, self.most = least, most
        self.least += MOMENTUM * (least - self.least)
        self.most += MOMENTUM * (most - self.most)


class Histogram(Observer):
    """How many values lie in each of BINS bins of equal width; those who tell a range read it."""

    def __init__(self, choose: Callable[[Tensor, float, float], tuple[float, float]]) -> None:
        super().__init__()
        self._counts = torch.zeros(BINS, dtype=torch.float64, device="cpu")
        self._choose = choose

    def _note(self, values: Tensor, least: float, most: float) -> None:
        before = self.least, self.most
        super()._note(values, least, most)
        if self.count and before != (self.least, self.most):
            self._counts = self._spread(*before)
        width = max(self.most - self.least, _TINY)
        found = torch.histc(values.detach().float(), BINS, self.least, self.least + width)
        self._counts += found.double()

    def _spread(self, least: float, most: float) -> Tensor:
        """The counts of a smaller range in bins of the present one, by the middles of bins."""
        width = (most - least) / BINS
        middles = least + width * (torch.arange(BINS, dtype=torch.float64, device="cpu") + 0.5)
        whole = max(self.most - self.least, _TINY)
        places = ((middles - self.least) / whole * BINS).long().clamp(0, BINS - 1)
        return torch.zeros(BINS, dtype=torch.float64, device="cpu").index_add_(
            0, places, self._counts
        )

    def range(self) -> tuple[float, float]:
        """The range that is chosen by the histogram."""
        if self.most <= self.least:
            return self.least, self.most
        return self._choose(self._counts, self.least, self.most)


_TINY = torch.finfo(torch.float32).tiny


def of_percentile(
    counts: Tensor, least: float, most: float, percentile: float = PERCENTILE
) -> tuple[float, float]:
    """The range that leaves out (100 - percentile) % of the values, half of them at each end, and
    none at an end where zero is."""
    outside = (1 - percentile / 100) / 2
    below = counts.cumsum(0) / counts.sum()
    width = (most - least) / BINS
    first = int((below <= outside).sum())
    last = int((below < 1 - outside).sum())
    return (
        least if least == 0 else least + first * width,
        most if most == 0 else least + (last + 1) * width,
    )


def of_least_error(counts: Tensor, least: float, most: float) -> tuple[float, float]:
    """The range with the least squared error of rounding and clamping."""
    return _best(counts, least, most, _squared_error)


def of_least_divergence(counts: Tensor, least: float, most: float) -> tuple[float, float]:
    """The range whose clamped and rounded histogram has the least Kullback-Leibler divergence.

    Source: Migacz, 8-bit Inference with TensorRT, 2017.
    """
    return _best(counts, least, most, _divergence)


def _best(
    counts: Tensor, least: float, most: float, cost: Callable[[Tensor, Tensor, float, float], float]
) -> tuple[float, float]:
    """The range of the least cost, of those that shrink one end after the other."""
    width = (most - least) / BINS
    middles = least + width * (torch.arange(BINS, dtype=torch.float64, device="cpu") + 0.5)
    low, high = min(least, 0.0), max(most, 0.0)
    shares = [step / _STEPS for step in range(_STEPS, 0, -1)]
    for _ in range(_ROUNDS):
        low = min(
            (share * least for share in shares), key=lambda end: cost(counts, middles, end, high)
        )
        high = min(
            (share * most for share in shares), key=lambda end: cost(counts, middles, low, end)
        )
    return low, high


def _squared_error(counts: Tensor, middles: Tensor, low: float, high: float) -> float:
    low, high = min(low, 0.0), max(high, 0.0)
    step = (high - low) / (LEVELS - 1)
    near = (((middles - low) / step).round() * step + low).clamp(low, high)
    return float((counts * (middles - near).square()).sum())


def _divergence(counts: Tensor, middles: Tensor, low: float, high: float) -> float:
    low, high = min(low, 0.0), max(high, 0.0)
    inside = middles.clamp(low, high)
    clamped = (inside != middles) & (counts > 0)
    step = (high - low) / (LEVELS - 1)
    codes = ((inside - low) / step).round().long().clamp(0, LEVELS - 1)
    used = (counts > 0).double()
    totals = torch.zeros(LEVELS, dtype=torch.float64, device="cpu").index_add_(0, codes, counts)
    places = torch.zeros(LEVELS, dtype=torch.float64, device="cpu").index_add_(
        0, codes, used * ~clamped
    )
    # What is clamped counts where the range ends, of which bytes know nothing.
    q = torch.where(clamped, 0.0, used * totals[codes] / places[codes].clamp_min(1))
    p = counts / counts.sum()
    q = q / q.sum().clamp_min(_TINY)
    ratio = torch.log((p + _SMOOTH) / (q + _SMOOTH))
    return float((p * ratio).sum())


_SMOOTH = 1e-12


OBSERVERS: dict[str, Callable[[], Observer]] = {
    "minmax": Observer,
    "moving_average": MovingAverage,
    "percentile": partial(Histogram, of_percentile),
    "mse": partial(Histogram, of_least_error),
    "kl": partial(Histogram, of_least_divergence),
}
"""What decides the range of activations, by name."""


def numbers_of(least: float, most: float, symmetric: bool) -> Numbers:
    """The bytes that cover a range, which is widened to hold zero; zero is met exactly.

    symmetric: int8 with zero point 0 and scale = largest magnitude / 127; else uint8 with scale =
    (most - least) / 255. A range of zero alone has the scale 1.
    """
    least, most = min(least, 0.0), max(most, 0.0)
    if symmetric:
        scale = _usable(max(-least, most) / 127)
        return Numbers(scale, 0, "int8")
    scale = _usable((most - least) / (LEVELS - 1))
    zero_point = min(max(round(-least / scale), 0), LEVELS - 1)
    return Numbers(scale, zero_point, "uint8")


def _usable(scale: float) -> float:
    return 1.0 if scale < 2.0**-100 else scale
