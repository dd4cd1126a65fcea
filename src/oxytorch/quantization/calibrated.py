"""Quantizing with calibration data: later columns make up for the rounding of earlier ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..ops.panels.formats import FORMATS

DAMPING = 0.01
"""Part of the mean of the moments' diagonal that is added to it."""

_BLOCK = 128  # columns between two updates of all that follow


def calibrated_codes(
    weight: Tensor, moments: Tensor, format: str, scales: Tensor, zero_points: Tensor | None
) -> Tensor:
    """Returns codes uint8 [out_features, in_features] that lower the error of x @ weight.T for
    inputs x, with the scales and zero points that `ops.quantize_weight` found.

    moments: float32 [in_features, in_features], the mean of x x^T over calibration inputs.

    Columns are rounded one after the other, those with the largest inputs first. What rounding one
    changes in the outputs is taken back, as far as the inputs allow, by the columns that are left.
    Computed in float32. Memory: twice moments and once weight in float32 beside the arguments.
    Source: Frantar et al., GPTQ, 2022, algorithm 1, with the order of columns of its later code.
    Raises ValueError for moments of another shape or that are not finite.
    """
    columns = weight.shape[1]
    _check_moments(moments, columns)
    size = columns // scales.shape[1]
    order = moments.diagonal().argsort(descending=True, stable=True)
    factor = _inverse_factor(moments[order][:, order])
    # Columns lie in rows here, so that each is one stretch of memory.
    left = weight.detach().float().t()[order].contiguous()
    round_column = _rounding(format, scales, zero_points)
    rounded = torch.empty(left.shape, dtype=torch.uint8, device="cpu")
    groups = (order // size).tolist()
    for begin in range(0, columns, _BLOCK):
        end = min(begin + _BLOCK, columns)
        errors = torch.empty(end - begin, left.shape[1], device="cpu")
        for index in range(begin, end):
            column = left[index]
            rounded[index], values = round_column(column, groups[index])
            error = torch.sub(column, values, out=errors[index - begin])
            error /= factor[index, index]
            left[index + 1 : end].addr_(factor[index, index + 1 : end], error, alpha=-1)
        left[end:].addmm_(factor[begin:end, end:].t(), errors, alpha=-1)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device="cpu")
    return codes.index_copy_(1, order, rounded.t())


def _check_moments(moments: Tensor, columns: int) -> None:
    if moments.shape != (columns, columns):
        raise ValueError(
            f"calibrated_codes: expected moments of shape {[columns, columns]}, "
            f"got {list(moments.shape)}"
        )
    if not bool(moments.isfinite().all()):
        raise ValueError("calibrated_codes: expected finite moments, got NaN or infinity")


def _inverse_factor(moments: Tensor) -> Tensor:
    """The upper triangular U with U^T U = (moments + damping)^-1, [in, in].

    Its row j says, for unit error in column j, what the later columns have to change. Inputs that
    were always zero are taken as independent of all others.
    """
    mean = float(moments.diagonal().mean())
    damping = DAMPING * mean if mean > 0 else 1.0
    for _ in range(8):
        # From the last column to the first: with J m J = L L^T, U is J L^-1 J.
        damped = moments.flip(0, 1)
        damped.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            identity = torch.eye(len(moments), device="cpu")
            inverse: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False)
            upper = inverse.flip(0, 1).contiguous()
            return upper
        damping *= 4
    raise ValueError("calibrated_codes: expected moments of inputs, got an indefinite matrix")


def _rounding(
    format: str, scales: Tensor, zero_points: Tensor | None
) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    """Returns what gives (codes, values) of one column [out] that lies in a group."""
    steps = scales.t().contiguous()
    kind = FORMATS[format]
    if kind.middle is None:
        table = kind.values()

        def nearest(column: Tensor, group: int) -> tuple[Tensor, Tensor]:
            codes = kind.nearest(column / steps[group])
            return codes.to(torch.uint8), table[codes] * steps[group]

        return nearest
    middle = torch.full_like(steps, kind.middle)
    zeros = middle if zero_points is None else zero_points.t().float().contiguous()

    def even(column: Tensor, group: int) -> tuple[Tensor, Tensor]:
        codes = (column / steps[group]).round_().add_(zeros[group]).clamp_(0, kind.largest_code)
        return codes.to(torch.uint8), (codes - zeros[group]).mul_(steps[group])

    return even
