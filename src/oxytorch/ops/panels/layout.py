"""The packed order of a weight [out_features, in_features], in plain PyTorch.

A panel is 16 neighbouring outputs, padded with zeros. Along in_features (k, padded with zeros to a
multiple of 64) it is a sequence of rows of 64 bytes; panels follow each other. Every level's
products read a row as it is:

    fp32        16 outputs x 1 k
    bf16        16 outputs x 2 k: pair (k, k + 1) of output o at bytes 4 o .. 4 o + 3
    int8, fp8   16 outputs x 4 k: k + j of output o at byte 4 o + j; codes 0 .. 255
    int4, nf4   16 outputs x 8 k: byte 4 o + j has k + j in its low, k + 4 + j in its high half
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .formats import FORMATS
from .formats import GROUP_SIZES as GROUP_SIZES

OUTPUTS = 16
"""Outputs of a panel."""

DEPTH = 64
"""in_features are padded to a multiple of this."""


def panels_of(out_features: int, gated: bool = False) -> int:
    """Number of panels; the two halves of a gated weight are padded separately."""
    halves = 2 if gated else 1
    return halves * -(-(out_features // halves) // OUTPUTS)


def padded_depth(in_features: int) -> int:
    """in_features with the padding."""
    return -(-in_features // DEPTH) * DEPTH


def panel_bytes(format: str, in_features: int) -> int:
    """Bytes of one panel."""
    return padded_depth(in_features) * OUTPUTS * FORMATS[format].stored_bits // 8


def by_panel(values: Tensor, gated: bool = False) -> Tensor:
    """Arranges [out, ...] as [panels, 16, ...]; the halves of a gated weight alternate."""
    halves = values.chunk(2) if gated else (values,)
    missing = -halves[0].shape[0] % OUTPUTS
    after = [0, 0] * (values.dim() - 1)
    padded = [F.pad(half, [*after, 0, missing]) if missing else half for half in halves]
    padded = [torch.unflatten(half, 0, (-1, OUTPUTS)) for half in padded]
    return torch.stack(padded, 1).flatten(0, 1) if gated else padded[0]


def by_output(values: Tensor, out_features: int, gated: bool = False) -> Tensor:
    """The inverse of `by_panel`."""
    if not gated:
        return values.flatten(0, 1)[:out_features]
    half = out_features // 2
    return torch.cat([values[side::2].flatten(0, 1)[:half] for side in (0, 1)])


def pack(format: str, values: Tensor, gated: bool = False) -> Tensor:
    """Packs values or uint8 codes [out, in]: uint8 [panels, bytes of a panel]."""
    stored_bits = FORMATS[format].stored_bits
    rows = by_panel(values, gated)
    missing = -values.shape[1] % DEPTH
    if missing:
        rows = F.pad(rows, [0, missing])
    if stored_bits >= 8:
        rows = torch.unflatten(rows, 2, (-1, 32 // stored_bits))
    else:
        halves = torch.unflatten(rows, 2, (-1, 2, 4))
        rows = halves[..., 0, :] | halves[..., 1, :] << 4
    return rows.transpose(1, 2).contiguous().view(torch.uint8).flatten(1)


def unpack(
    format: str, panels: Tensor, out_features: int, in_features: int, gated: bool = False
) -> Tensor:
    """The inverse of `pack`."""
    rows = panels.reshape(panels_of(out_features, gated), -1, OUTPUTS, 4)
    if not FORMATS[format].has_codes:
        rows = rows.contiguous().view(FORMATS[format].dtype)
    elif FORMATS[format].stored_bits == 4:
        rows = torch.cat([rows & 15, rows >> 4], -1)
    values = rows.transpose(1, 2).flatten(2)[..., :in_features]
    found = by_output(values, out_features, gated)
    return found.clone(memory_format=torch.contiguous_format)


def split_scales(scales: Tensor, exactly: bool = False) -> tuple[Tensor, Tensor]:
    """Splits scales float32 [out, groups] into powers of two [out] and float16 [out, groups].

    The power brings the largest scale of its output into [0.5, 1): a float16 scale stays exact.
    exactly: where float16 does not hold all of them, they are float32 and the powers 1.
    """
    largest = scales.abs().amax(1)
    exponents = torch.frexp(largest).exponent
    ones = torch.ones_like(largest)
    powers = torch.where(largest > 0, torch.ldexp(ones, exponents), 1.0)
    halves = (scales / powers[:, None]).to(torch.float16)
    if exactly and not torch.equal(halves.float() * powers[:, None], scales):
        return ones, scales
    return powers, halves


def joined_scales(channel_scales: Tensor, group_scales: Tensor | None) -> Tensor:
    """Scales [panels, 16, groups] in the dtype of `channel_scales`."""
    channel = channel_scales.reshape(-1, OUTPUTS, 1)
    if group_scales is None:
        return channel
    return channel * group_scales.to(channel.dtype).transpose(1, 2)


def values_of(format: str, codes: Tensor, scales: Tensor, zero_points: Tensor | None) -> Tensor:
    """Dequantizes codes [out, in] with scales and zero points [out, groups], in scales' dtype."""
    kind = FORMATS[format]
    grouped = torch.unflatten(kind.units(codes, scales.dtype), 1, (scales.shape[1], -1))
    if kind.middle is not None:
        grouped = grouped - (kind.middle if zero_points is None else zero_points[..., None])
    return (grouped * scales[..., None]).flatten(1)
