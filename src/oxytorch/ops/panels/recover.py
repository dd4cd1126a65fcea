"""From values that were rounded to a format to the codes and scales that give them exactly."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .formats import FORMATS, WeightFormat
from .layout import values_of

_SAMPLE = 8
"""Values of a group that a scale is tried with before all are."""

_TOGETHER = 1 << 18
"""Values whose scales are found together: what is computed of them stays in the caches."""

_BYTE_SPANS = 3
"""How many codes of 8 bits a range of them may fall short of."""

_SIGNIFICANT = 11
"""Bits of a scale that float16 holds."""


def recovered(
    format: str, values: Tensor, group_size: int, symmetric: bool, is_float16: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (codes, scales, zero_points, found); values = scale (code - zero_point) where found.

    values: [out, in] in the dtype of the plain weight.
    is_float16: scales have 11 significant bits. codes: uint8 [out, in]; scales: float32 [out,
        groups]; zero_points: uint8 and found: bool of their shape. What is not found is left zero;
        it was not rounded to this format, or by a scale that another group of codes is far from
        using up.

    The largest value of a group is its scale times one of few codes. Each of these is tried; the
    others' codes follow, and each value says between which bounds the scale lies, as it was rounded
    to its dtype. A number between all bounds gives them all.
    """
    kind = FORMATS[format]
    grouped = torch.unflatten(values, 1, (-1, group_size)).flatten(0, 1)
    codes = torch.zeros(grouped.shape, dtype=torch.uint8, device="cpu")
    scales = torch.zeros(len(grouped), device="cpu")
    zero_points = torch.zeros(len(grouped), dtype=torch.uint8, device="cpu")
    found = torch.zeros(len(grouped), dtype=torch.bool, device="cpu")
    wide = grouped.float()
    left = wide.any(1)
    sample = wide[:, :: max(1, group_size // _SAMPLE)].contiguous()
    for guess in _guesses(kind, wide, symmetric, values.dtype):
        one = _is_near(kind, sample[:, -1:], guess, values.dtype) & (guess != 0) & left
        (own,) = one.nonzero(as_tuple=True)
        own = own[_is_near(kind, sample[own], guess[own], values.dtype)]
        for some in torch.split(own, max(1, _TOGETHER // group_size)):
            code, scale, zero = _scaled(kind, grouped[some], guess[some], symmetric, is_float16)
            given = values_of(format, code, scale[:, None], zero[:, None]).to(values.dtype)
            exact = (given == grouped[some]).all(1)
            at = some[exact]
            codes[at], scales[at], zero_points[at] = code[exact], scale[exact], zero[exact]
            found[at], left[at] = True, False
        if own.numel() and not bool(left.any()):
            break
    shape = len(values), -1
    return (
        codes.view(values.shape),
        scales.view(shape),
        zero_points.view(shape),
        found.view(shape),
    )


def _is_near(kind: WeightFormat, values: Tensor, guess: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether all values of a group are about multiples of a guessed scale."""
    units = values / guess[:, None]
    nearest = _values(kind, units)
    reach = nearest.abs() * _tolerance(kind, dtype) + _least_step(dtype) / 2 / guess.abs()[:, None]
    return ((units - nearest).abs() <= reach).all(1)


def _scaled(
    kind: WeightFormat, values: Tensor, guess: Tensor, symmetric: bool, is_float16: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of groups by guessed scales, and the scales and zero points that give their values."""
    multiples = _values(kind, values.float() / guess[:, None])
    scale = _between(values, multiples, is_float16)
    zero = _zero_points(kind, multiples, symmetric)
    if kind.middle is None:
        code = kind.nearest(multiples)
    else:
        code = (multiples + zero[:, None]).clamp(0, kind.largest_code)
    return code.to(torch.uint8), scale, zero.to(torch.uint8)


def _guesses(
    kind: WeightFormat, wide: Tensor, symmetric: bool, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Scales [groups] that the largest value of a group, or its range, leaves possible."""
    low, high = wide.amin(1).clamp(max=0), wide.amax(1).clamp(min=0)
    larger = torch.where(-low >= high, low, high)
    if kind.middle is None:
        for value in _largest(kind):
            yield larger.abs() / value
        return
    last = kind.middle if symmetric else kind.largest_code
    least = 1 if kind.bits < 8 else last - _BYTE_SPANS
    span = high - low
    if symmetric:  # scales of 4 bits have either sign
        span = larger.abs() if kind.bits == 8 else -larger
    shifts = [n * 2.0**-_SIGNIFICANT for n in range(-8, 9)] if _is_vague(kind, dtype) else [0.0]
    for steps in range(last, least - 1, -1):
        for shift in shifts:
            yield span * ((1 + shift) / steps)


def _is_vague(kind: WeightFormat, dtype: torch.dtype) -> bool:
    """Whether the largest value of a group tells the scale too vaguely for the others' codes."""
    return kind.middle is not None and kind.bits == 8 and torch.finfo(dtype).bits < 32


def _tolerance(kind: WeightFormat, dtype: torch.dtype) -> float:
    """By how much, of itself, a value may differ from a multiple of a guessed scale."""
    eps = torch.finfo(dtype).eps
    if dtype == torch.float32:
        return 4 * eps
    return 1.1 * (eps / 2 + (2.0 ** -(_SIGNIFICANT + 1) if _is_vague(kind, dtype) else eps / 2))


def _least_step(dtype: torch.dtype) -> float:
    """Between neighbouring numbers that are not normal."""
    kind = torch.finfo(dtype)
    return kind.smallest_normal * kind.eps


def _largest(kind: WeightFormat) -> list[float]:
    """Magnitudes that the largest value of a group may have, in scales."""
    magnitudes = kind.values(torch.device("cpu")).abs()
    magnitudes = magnitudes[magnitudes.isfinite() & (magnitudes > 0)].sort(descending=True).values
    if kind.floats is None:
        return [*dict.fromkeys(magnitudes.tolist())]
    # The others are these, times powers of two, which the scale takes on.
    seen: dict[float, float] = {}
    for value, mantissa in zip(
        magnitudes.tolist(), magnitudes.frexp().mantissa.tolist(), strict=True
    ):
        seen.setdefault(mantissa, value)
    return [*seen.values()]


def _values(kind: WeightFormat, units: Tensor) -> Tensor:
    """The nearest values of codes, in scales, before their bounds."""
    if kind.middle is not None:
        return units.round()
    codes = kind.nearest(units.nan_to_num(0.0))
    return kind.units(codes.to(torch.uint8), torch.float32)


def _zero_points(kind: WeightFormat, multiples: Tensor, symmetric: bool) -> Tensor:
    if kind.middle is None or symmetric:
        return torch.full_like(multiples[:, 0], kind.middle or 0)
    return (-multiples.amin(1)).clamp(0, kind.largest_code)


def _between(values: Tensor, multiples: Tensor, is_float16: bool) -> Tensor:
    """The scale of each group, float32, whose multiples round to the values, if one does."""
    kind = torch.finfo(values.dtype)
    exact, factors = values.double(), multiples.double()
    mantissa, exponent = exact.abs().frexp()
    least = _least_step(values.dtype) / 2
    above = torch.ldexp(torch.full_like(exact, kind.eps / 4), exponent).clamp(min=least)
    below = torch.where(mantissa == 0.5, above / 2, above).clamp(min=least)  # powers of two
    signs = exact.sign()
    first, second = (exact - signs * below) / factors, (exact + signs * above) / factors
    is_zero = factors == 0
    low = torch.where(is_zero, -torch.inf, torch.minimum(first, second)).amax(1)
    high = torch.where(is_zero, torch.inf, torch.maximum(first, second)).amin(1)
    scale = ((low + high) / 2).float()
    if not is_float16:
        return scale
    mantissa, exponent = scale.double().frexp()
    return torch.ldexp((mantissa * 2**_SIGNIFICANT).round(), exponent - _SIGNIFICANT).float()
