"""How parameters and optimizer states are kept in memory, in plain PyTorch.

The same formats as ops/optimizer_step/formats.h: what one writes the other reads, bit for bit.
Tensors keep the shape and strides of their parameter; codes are numbered in memory order.
"""

from __future__ import annotations

import torch
from torch import Tensor

CODE_BLOCK = 256
"""Elements that share a scale."""

LAST_SIGNED = 127.0
LAST_UNSIGNED = 255.0


def split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The halves of float32 `weight`: bfloat16 (truncated, not rounded) and int16.

    The bits of `weight` are those of the first half followed by those of the second.
    """
    if weight.dtype != torch.float32:
        raise TypeError(f"split: expected weight of dtype float32, got {weight.dtype}")
    bits = weight.detach().view(torch.int32)
    upper = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    return upper, bits.to(torch.int16)


def join(upper: Tensor, low: Tensor) -> Tensor:
    """The float32 tensor whose halves are `upper` (bfloat16) and `low` (int16)."""
    if upper.dtype != torch.bfloat16 or low.dtype != torch.int16:
        raise TypeError(
            f"join: expected halves of dtype bfloat16 and int16, got {upper.dtype} and {low.dtype}"
        )
    high_bits = upper.detach().view(torch.int16).to(torch.int32) << 16
    return (high_bits | (low.to(torch.int32) & 0xFFFF)).view(torch.float32)


def in_memory_order(tensor: Tensor) -> Tensor:
    """A flat view of a dense tensor's elements as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _blocks(values: Tensor) -> Tensor:
    """Flat values as rows of CODE_BLOCK, padded with zeros."""
    rest = -values.numel() % CODE_BLOCK
    return torch.nn.functional.pad(values, (0, rest)).view(-1, CODE_BLOCK)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 values of 8-bit codes: scale sign(c) c^2 for int8, scale c^4 for uint8."""
    c = _blocks(in_memory_order(codes).float())
    squares = c * c.abs()
    values = (squares if codes.dtype == torch.int8 else squares * squares) * scales[:, None]
    result = torch.empty_like(codes, dtype=torch.float32)
    in_memory_order(result).copy_(values.flatten()[: codes.numel()])
    return result


def encode(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """8-bit codes and scales nearest to float32 `values`; values that were decoded come out same.

    signed: int8 codes, else uint8 codes of values that are not negative.
    """
    blocks = _blocks(in_memory_order(values.detach().float()))
    top = blocks.abs().amax(1, keepdim=True)
    power, last = (2, LAST_SIGNED) if signed else (4, LAST_UNSIGNED)
    scales = top / last**power
    # A decoded block has a scale within a rounding of this one.
    inverse = torch.where(top > 0, 1 / top, 0.0)
    codes = ((blocks.abs() * inverse) ** (1 / power) * last).round().clamp_(max=last)
    if not signed:
        codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
    magnitudes = codes * codes if signed else (codes * codes) * (codes * codes)
    infinity = torch.full_like(scales, float("inf"))
    for candidate in (torch.nextafter(scales, infinity), torch.nextafter(scales, -infinity)):
        exact = (magnitudes * candidate == blocks.abs()).all(1, keepdim=True)
        scales = torch.where(exact, candidate, scales)
    if signed:
        codes = torch.where(blocks < 0, -codes, codes)
    dtype = torch.int8 if signed else torch.uint8
    result = torch.empty_like(values, dtype=dtype)
    in_memory_order(result).copy_(codes.nan_to_num().flatten()[: values.numel()].to(dtype))
    return result, scales.flatten()
