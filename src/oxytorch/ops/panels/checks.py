"""Checks of what weights in panels are made from: an error names the argument and both values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import layout
from .formats import FORMATS, PLAIN

if TYPE_CHECKING:
    from .weight import PanelWeight


def _fail(argument: str, wanted: str, given: object) -> None:
    raise ValueError(f"PanelWeight: expected {argument} {wanted}, got {given}")


def check_format(format: str) -> None:
    """`format` is known."""
    if format not in FORMATS:
        _fail("format", f"in {list(FORMATS)}", repr(format))


def check_plain_format(format: str) -> None:
    """`format` has floating-point values and no codes."""
    if format not in PLAIN:
        _fail("format", f"in {list(PLAIN)}", repr(format))


def check_group_size(group_size: int | None, in_features: int) -> None:
    """Groups have a size that kernels know and fill in_features."""
    if group_size is None:
        return
    if group_size not in layout.GROUP_SIZES:
        _fail("group_size", f"in {list(layout.GROUP_SIZES)} or None", group_size)
    if in_features % group_size:
        _fail("group_size", f"that divides in_features {in_features}", group_size)


def check_matrix(weight: Tensor) -> None:
    """A floating weight [out, in] with elements."""
    if weight.dim() != 2 or not weight.numel():
        _fail("weight", "of shape [out_features, in_features]", list(weight.shape))
    if not weight.is_floating_point():
        _fail("weight", "of a floating dtype", weight.dtype)


def check_codes(format: str, codes: Tensor, scales: Tensor, zero_points: Tensor | None) -> None:
    """Codes, scales and zero points that fit together."""
    check_format(format)
    if not FORMATS[format].has_codes:
        _fail("format", "with codes", repr(format))
    if codes.dim() != 2 or not codes.numel() or codes.dtype != torch.uint8:
        _fail("codes", "uint8 [out_features, in_features]", f"{codes.dtype} {list(codes.shape)}")
    out_features, in_features = codes.shape
    if scales.dim() != 2 or scales.shape[0] != out_features or not scales.shape[1]:
        _fail("scales", f"of shape [{out_features}, groups]", list(scales.shape))
    groups = scales.shape[1]
    if in_features % groups:
        _fail("scales", f"with groups that divide in_features {in_features}", groups)
    if groups > 1:
        check_group_size(in_features // groups, in_features)
    if not bool(scales.isfinite().all()):
        _fail("scales", "that are finite", "infinity or NaN")
    most = FORMATS[format].largest_code
    if bool((codes > most).any()):
        _fail("codes", f"from 0 to {most}", int(codes.max()))
    if zero_points is None:
        return
    if FORMATS[format].middle is None:
        _fail("zero_points", f"None for {format}", list(zero_points.shape))
    if zero_points.shape != scales.shape or zero_points.dtype != torch.uint8:
        given = f"{zero_points.dtype} {list(zero_points.shape)}"
        _fail("zero_points", f"uint8 {list(scales.shape)}", given)
    if bool((zero_points > most).any()):
        _fail("zero_points", f"from 0 to {most}", int(zero_points.max()))


def check_tensors(
    tensors: Mapping[str, Tensor],
    format: str,
    shape: Sequence[int],
    group_size: int | None,
    gated: bool,
) -> None:
    """The stored tensors of a weight: all that it needs, nothing else, of the right form."""
    check_format(format)
    out_features, in_features = shape
    check_group_size(group_size, in_features)
    panels = layout.panels_of(out_features, gated)
    groups = in_features // group_size if group_size else 1
    wanted = {"panels": (torch.uint8, [panels * layout.panel_bytes(format, in_features)])}
    if FORMATS[format].has_codes:
        wanted["channel_scales"] = torch.float32, [panels * layout.OUTPUTS]
        if group_size:
            given = tensors.get("group_scales")
            dtype = torch.float16 if given is None or given.dtype != torch.float32 else given.dtype
            wanted["group_scales"] = dtype, [panels, groups, layout.OUTPUTS]
    if FORMATS[format].middle is not None and "zero_points" in tensors:
        wanted["zero_points"] = torch.uint8, [panels, groups, layout.OUTPUTS]
    if tensors.keys() != wanted.keys():
        _fail("tensors", f"{sorted(wanted)}", sorted(tensors))
    for name, (dtype, size) in wanted.items():
        found = tensors[name]
        if (found.dtype, list(found.shape)) != (dtype, size):
            _fail(name, f"{dtype} {size}", f"{found.dtype} {list(found.shape)}")
        if not found.is_contiguous():
            _fail(name, "contiguous", f"strides {list(found.stride())}")


def check_alike(
    what: str, weights: Sequence[PanelWeight], *, same_shape: bool = False
) -> PanelWeight:
    """Weights that can become one, or with `same_shape` take each other's place; returns the first.

    Weights that become one are not gated yet.
    """
    first = weights[0]
    names = ["format", "group_size", "dtype", "activation_dtype"]
    if same_shape:
        names += ["shape", "is_gated"]
    for weight in weights:
        for name in names:
            wanted, given = getattr(first, name), getattr(weight, name)
            if wanted != given:
                raise ValueError(f"{what}: expected {name} {wanted} in every weight, got {given}")
        if weight.shape[1] != first.shape[1]:
            raise ValueError(
                f"{what}: expected {first.shape[1]} in_features in every weight, "
                f"got {weight.shape[1]}"
            )
        if weight.is_gated and not same_shape:
            raise ValueError(f"{what}: expected weights that are not gated yet, got a gated one")
        if (weight.zero_points is None) != (first.zero_points is None):
            raise ValueError(f"{what}: expected zero_points in every weight or in none, got both")
    return first
