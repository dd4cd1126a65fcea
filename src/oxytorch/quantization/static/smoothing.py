"""Factors by which layers take smaller numbers in some channels, chosen by the error of the layers.

Sources: Xiao et al., SmoothQuant, 2022; the search of alpha is that of Lin et al., AWQ, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from ...ops.dequantize_per_tensor import dequantize_per_tensor
from ...ops.quantize_per_tensor import quantize_per_tensor
from ...program.passes.quantized_layers import Numbers, Smoothing
from ...program.passes.quantized_weights import LARGEST, SMALLEST
from ...program.passes.smoothing import Geometry
from .observers import OBSERVERS, Histogram, numbers_of
from .recipe import UNSEEN

ALPHAS, BETWEEN = (0.1, 0.3, 0.5, 0.7, 0.9), 0.1
"""Parts of the range of activations that are moved into the weights: those that are tried first,
and how far from the best of them others are tried."""
GAIN = 0.9
"""Factors are taken where the squared error is at most this part of that without."""
_ROWS, _ROWS_OF_CALL = 256, 32
"""Rows of a linear layer's input that are kept of half of the calls, and of one call."""
_IMAGES, _SIDE = 4, 16
"""Parts of images that a convolution takes, of half of the calls, and their sizes."""
_LEAST = 1e-4
"""Of the largest channel: what smaller ones are taken for."""

Call = tuple[Tensor, Geometry | None]
"""The weight of a layer, and the geometry of a convolution."""


@dataclass
class _Seen:
    """What was seen of a value: the least and the largest number of each channel, and parts."""

    least: Tensor
    most: Tensor
    kept: list[Tensor] = field(default_factory=list)

    @property
    def ranges(self) -> Tensor:
        """The largest magnitude of each channel."""
        return torch.maximum(self.most, -self.least)

    def with_(self, other: _Seen) -> _Seen:
        """What was seen of both."""
        least, most = torch.minimum(self.least, other.least), torch.maximum(self.most, other.most)
        return _Seen(least, most, [*self.kept, *other.kept])


class Smoother:
    """The value that layers take: the range of each channel, and a part of it.

    dim: of its channels. Every other call is kept apart: factors are made by the ranges of one
    half, and compared by the errors of the other, whose numbers may be beyond these ranges.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._halves: list[_Seen] = []
        self._calls = 0

    def __deepcopy__(self, memo: object) -> Smoother:
        """A copy that shares what was kept, which nobody writes to."""
        other = Smoother(self.dim)
        other._halves, other._calls = [*self._halves], self._calls
        return other

    def see(self, values: Tensor) -> None:
        """Take notice of a value."""
        if values.numel() == 0:
            return
        values = values.detach()
        others = [dim for dim in range(values.dim()) if dim != self.dim % values.dim()]
        least, most = values.float(), values.float()
        if others:
            least, most = least.amin(others), most.amax(others)
        place = self._calls % 2
        self._calls += 1
        kept = self._halves[place].kept if place < len(self._halves) else []
        part = self._rows(values, kept) if self.dim == -1 else self._image(values, kept)
        seen = _Seen(least, most, [] if part is None else [part.float().contiguous()])
        if place < len(self._halves):
            self._halves[place] = self._halves[place].with_(seen)
        else:
            self._halves.append(seen)

    def _rows(self, values: Tensor, kept: Sequence[Tensor]) -> Tensor | None:
        wanted = min(_ROWS - sum(map(len, kept)), _ROWS_OF_CALL)
        if wanted <= 0:
            return None
        rows = values.reshape(-1, values.shape[-1])
        return rows[:: max(1, len(rows) // wanted)][:wanted].clone()

    def _image(self, values: Tensor, kept: Sequence[Tensor]) -> Tensor | None:
        if len(kept) >= _IMAGES:
            return None
        for dim in range(2, values.dim()):
            size = min(values.shape[dim], _SIDE)
            values = values.narrow(dim, (values.shape[dim] - size) // 2, size)
        return values[:1].clone()

    def smoothing(
        self, layers: tuple[str, ...], calls: Sequence[Call], observer: str, symmetric: bool
    ) -> Smoothing:
        """The factors with the least squared error of what layers give, or why there are none.

        layers: their names; calls: their weights.
        observer, symmetric: of the configuration.
        """
        if not self._halves:
            return Smoothing(layers, why=UNSEEN)
        first, *rest = self._halves
        inner = torch.stack([_of_inputs(weight, geometry) for weight, geometry in calls]).amax(0)
        search = _Search([*rest, first][0].kept, calls, self.dim)
        errors: dict[float, float] = {}

        def error_with(factors: Tensor) -> float:
            return search.error(factors, self._numbers(first, factors, observer, symmetric))

        def error_of(alpha: float) -> float:
            if alpha not in errors:
                errors[alpha] = error_with(_factors(first.ranges, inner, alpha))
            return errors[alpha]

        best = min(ALPHAS, key=error_of)
        alpha = min((round(best + d, 2) for d in (0.0, -BETWEEN, BETWEEN)), key=error_of)
        if not error_of(alpha) < GAIN * error_with(torch.ones_like(first.ranges)):
            return Smoothing(layers, why="no factors lower its error by a tenth")
        seen = first.with_(rest[0]) if rest else first
        factors = _factors(seen.ranges, inner, alpha)
        numbers = self._numbers(seen, factors, observer, symmetric)
        return Smoothing(layers, alpha, (*map(_shortened, factors.tolist()),), numbers)

    def _numbers(self, seen: _Seen, factors: Tensor, observer: str, symmetric: bool) -> Numbers:
        """The bytes of the divided value, by what an observer would see of it."""
        own = OBSERVERS[observer]()
        parts = [(part / _along(factors, part, self.dim)).flatten() for part in seen.kept]
        if not isinstance(own, Histogram):  # which asks how many values there are
            parts += [seen.least / factors, seen.most / factors]
        own.see(torch.cat(parts))
        return numbers_of(*own.range(), symmetric)


class _Search:
    """The squared error of what layers give by factors."""

    def __init__(self, parts: Sequence[Tensor], calls: Sequence[Call], dim: int) -> None:
        self._parts, self._calls, self._dim = parts, calls, dim
        self._wanted = [[_given(part, *call) for call in calls] for part in parts]

    def error(self, factors: Tensor, numbers: Numbers) -> float:
        near = [(_rounded(_scaled(w, factors, own)), own) for w, own in self._calls]
        total = 0.0
        for part, wanted in zip(self._parts, self._wanted, strict=True):
            x = _near(part / _along(factors, part, self._dim), numbers)
            for call, own in zip(near, wanted, strict=True):
                total += float((_given(x, *call) - own).square().sum())
        return total


def _factors(ranges: Tensor, inner: Tensor, alpha: float) -> Tensor:
    """Factors by the largest magnitudes of what channels take, and of their weights."""
    wide, narrow = (
        each.clamp_min(max(_LEAST * float(each.max()), SMALLEST)) for each in (ranges, inner)
    )
    logs = alpha * wide.log() - (1 - alpha) * narrow.log()
    return (logs - logs.mean()).exp()


def _of_inputs(weight: Tensor, geometry: Geometry | None) -> Tensor:
    """The largest magnitude of the weights of each input."""
    groups = 1 if geometry is None else geometry.groups
    outputs, inputs = weight.shape[:2]
    parts = weight.float().abs().reshape(groups, outputs // groups, inputs, -1)
    return parts.amax((1, 3)).flatten()


def _scaled(weight: Tensor, factors: Tensor, geometry: Geometry | None) -> Tensor:
    groups = 1 if geometry is None else geometry.groups
    outputs, inputs = weight.shape[:2]
    parts = weight.float().reshape(groups, outputs // groups, inputs, -1)
    return (parts * factors.reshape(groups, 1, inputs, 1)).reshape(weight.shape)


def _rounded(weight: Tensor) -> Tensor:
    """A weight as bytes hold it: see `passes.quantized_weights`."""
    rows = weight.flatten(1)
    scales = (rows.abs().amax(1, keepdim=True) / LARGEST).clamp_min(SMALLEST)
    return ((rows / scales).round() * scales).reshape(weight.shape)


def _given(x: Tensor, weight: Tensor, geometry: Geometry | None) -> Tensor:
    if geometry is None:
        return F.linear(x, weight.float())
    none = [0] * len(geometry.stride)
    return torch.convolution(
        x,
        weight.float(),
        None,
        [*geometry.stride],
        [*geometry.padding],
        [*geometry.dilation],
        False,
        none,
        geometry.groups,
    )


def _near(values: Tensor, numbers: Numbers) -> Tensor:
    scale, zero_point = numbers.scale, numbers.zero_point
    stored = quantize_per_tensor(values, scale, zero_point, numbers.dtype)
    return dequantize_per_tensor(stored, scale, zero_point, "float32")


def _along(factors: Tensor, values: Tensor, dim: int) -> Tensor:
    size = [1] * values.dim()
    size[dim] = -1
    return factors.reshape(size)


def _shortened(number: float) -> float:
    return float(f"{number:.6g}")
