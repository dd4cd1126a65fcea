"""Weights quantized to 4 and 8 bits, with scales: the op by its schema, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .._binding import with_kernel
from ..panels.formats import FORMATS, WeightFormat

_SYMMETRIC_RANGES = (7.2, 7.7, 8.3, 8.9, 9.6, 10.4, 11.3, 12.5, 14.0, 16.5, 20.0)
"""How many scales long the larger side of a group of 4 bits is; beyond 8 it is cut off.

Three times as many would lower the error by another 0.3 %.
"""
_ASYMMETRIC_FRACTIONS = tuple(1.0 - 0.05 * step for step in range(11))
"""Which part of a group's range the steps of asymmetric codes cover: all to half of it."""

_LEAST_SCALE = 2.0**-100
"""Weights of smaller ones are zero; their reciprocals are finite."""

_CHUNK = 1 << 18  # elements that the reference works on at a time: they stay in the cache


@with_kernel
def quantize_weight(
    weight: Tensor, format: str, group_size: int, symmetric: bool, search: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As the function of this name that calls it; zero_points are given for symmetric codes too.

    group_size: in_features for one group. There is no gradient. Raises RuntimeError for arguments
    that do not fit.
    """
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, columns // max(group_size, 1), device=weight.device)
    zero_points = torch.empty(scales.shape, dtype=torch.uint8, device=weight.device)
    if weight.numel() == 0:
        return codes, scales, zero_points
    kind = FORMATS[format]
    step = max(1, _CHUNK // columns)
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        groups = weight[part].detach().float().reshape(-1, columns // group_size, group_size)
        found = _quantized(kind, groups, symmetric, search and kind.searches)
        codes[part] = found[0].reshape(-1, columns).to(torch.uint8)
        # What is not finite differs from itself.
        scales[part] = found[1][..., 0] + (groups - groups).sum(2)
        zero_points[part] = found[2][..., 0].to(torch.uint8)
    return codes, scales, zero_points


def _scale(values: Tensor, groups: Tensor) -> Tensor:
    """The scale as it is kept: not zero, and with 11 significant bits where there are groups."""
    least = torch.where(values < 0, -_LEAST_SCALE, _LEAST_SCALE)
    values = torch.where(values.abs() < _LEAST_SCALE, least, values)
    if groups.shape[1] == 1:
        return values
    bits = values.view(torch.int32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)


def _coded(groups: Tensor, scale: Tensor, zero: Tensor, last: int) -> Tensor:
    return (groups / scale).round().add_(zero).clamp_(0, last)


def _range(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest value of each group, zero among them."""
    return groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)


def _quantized(
    kind: WeightFormat, groups: Tensor, symmetric: bool, search: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zero points of groups."""
    if kind.middle is None:
        return _by_value(kind, groups)
    if symmetric:
        return _symmetric(kind, groups, search)
    return _asymmetric(kind, groups, search)


def _by_value(kind: WeightFormat, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = _scale(groups.abs().amax(2, keepdim=True) / kind.largest_value, groups)
    return kind.nearest(groups / scale), scale, torch.zeros_like(scale)


def _symmetric(kind: WeightFormat, groups: Tensor, search: bool) -> tuple[Tensor, Tensor, Tensor]:
    assert kind.middle is not None
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    zero = torch.full_like(low, kind.middle)
    scale = torch.maximum(-low, high) / (kind.middle - 1)
    if search:
        # The larger side gets the codes below the middle, by the sign of the scale.
        larger = torch.where(-low >= high, low, high)
        best = _Best(groups, kind.largest_code)
        for length in _SYMMETRIC_RANGES:
            best.offer(larger / (-length * kind.middle / 8), zero)
        scale = best.scale
    scale = _scale(scale, groups)
    return _coded(groups, scale, zero, kind.largest_code), scale, zero


def _asymmetric(kind: WeightFormat, groups: Tensor, search: bool) -> tuple[Tensor, Tensor, Tensor]:
    last = kind.largest_code
    low, high = _range(groups)
    if not search:
        scale = _scale((high - low) / last, groups)
        zero = (-low / scale).round().clamp_(0, last)
        return _coded(groups, scale, zero, last), scale, zero
    best = _Best(groups, last)
    for fraction in _ASYMMETRIC_FRACTIONS:
        scale = (high - low) * (fraction / last)
        zero = (-low * fraction / scale.clamp(min=_LEAST_SCALE)).round().clamp_(0, last)
        best.offer(scale, zero)
    scale = _scale(best.scale, groups)
    return _coded(groups, scale, best.zero, last), scale, best.zero


class _Best:
    """The scale and zero point with the least squared error, of those that were offered.

    With integers q = code - zero_point, the error of w ~ s q is least at s = <w, q> / <q, q>,
    where it is <w, w> - <w, q>^2 / <q, q>: the gain that is compared is the last term.
    """

    def __init__(self, groups: Tensor, last: int) -> None:
        self.groups = groups
        self.last = last
        self.scale = torch.zeros_like(groups[..., :1])
        self.zero = torch.zeros_like(self.scale)
        self.gain = torch.full_like(self.scale, -1.0)

    def offer(self, scale: Tensor, zero: Tensor) -> None:
        safe = torch.where(scale.abs() < _LEAST_SCALE, 1.0, scale)
        q = (self.groups / safe).round().clamp(min=-zero, max=self.last - zero)
        wq = (self.groups * q).sum(2, keepdim=True)
        qq = (q * q).sum(2, keepdim=True).clamp(min=1)
        gain = wq * wq / qq
        better = gain > self.gain
        self.gain = torch.where(better, gain, self.gain)
        self.scale = torch.where(better, wq / qq, self.scale)
        self.zero = torch.where(better, zero, self.zero)
