"""How parameters and optimizer states are kept in memory, in plain PyTorch.

The same formats as ops/optimizer_step/formats.h: what one writes the other reads, bit for bit.
Tensors keep the shape and strides of their parameter; codes are numbered in memory order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import CODE_BLOCK

# Lower bits that are cut off, and the last code; by whether there is a sign.
_LAYOUT = {True: (20, 127), False: (19, 255)}

_LARGEST = 0x7FC00000
"""The bits of the largest bound, a NaN. Those of others, rounded up, may be the bits of -0."""


def split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The halves of float32 `weight`: the nearest bfloat16 (away from zero between two) and int16.

    The bits of `weight`, as an integer, are those of the first half times 2^16, plus the second.
    """
    if weight.dtype != torch.float32:
        raise TypeError(f"split: expected weight of dtype float32, got {weight.dtype}")
    weight = weight.detach()
    bits = weight.view(torch.int32)
    # A NaN stays one whatever its lower bits are.
    nearest = torch.where(weight.isnan(), bits | 0x400000, bits + 0x8000)
    return (nearest >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join(upper: Tensor, low: Tensor) -> Tensor:
    """The float32 tensor whose halves are `upper` (bfloat16) and `low` (int16)."""
    if upper.dtype != torch.bfloat16 or low.dtype != torch.int16:
        raise TypeError(
            f"join: expected halves of dtype bfloat16 and int16, got {upper.dtype} and {low.dtype}"
        )
    weight = upper.detach().float()
    weight.view(torch.int32).add_(low)
    return weight


def in_memory_order(tensor: Tensor) -> Tensor:
    """A flat view of a dense tensor's elements as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _blocks(values: Tensor) -> Tensor:
    """Flat values as rows of CODE_BLOCK, padded with zeros."""
    rest = -values.numel() % CODE_BLOCK
    return torch.nn.functional.pad(values, (0, rest)).view(-1, CODE_BLOCK)


def _in_shape(blocks: Tensor, like: Tensor) -> Tensor:
    """The values of rows of CODE_BLOCK in the shape and strides of `like`."""
    result = torch.empty_like(like, dtype=blocks.dtype, requires_grad=False)
    in_memory_order(result).copy_(blocks.flatten()[: like.numel()])
    return result


def decode(codes: Tensor, bounds: Tensor) -> Tensor:
    """float32 values of 8-bit codes.

    A code is the upper bits of a float32 less those of its block's bound, the value of the last
    code: int8 (as bits: sign, 7 bits of code) has 3 bits of mantissa and zero as code 0; uint8,
    for values that are never negative, has 4 and no zero of its own.
    """
    signed = codes.dtype == torch.int8
    shift, last = _LAYOUT[signed]
    code = _blocks(in_memory_order(codes).view(torch.uint8).to(torch.int32))
    magnitude = code & last
    zero = (bounds.float().view(torch.int32)[:, None] >> shift) - last
    bits = (magnitude + zero) << shift
    if signed:
        bits = torch.where(magnitude != 0, bits, 0) | (code & 128) << 24
    return _in_shape(bits.view(torch.float32), codes)


def encode(values: Tensor, signed: bool, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """8-bit codes and bounds of float32 `values`; values that were decoded come out the same.

    signed: int8 codes, else uint8 codes of values that are not negative.
    noise: what is added to the bits before the lower ones are cut off, in memory order; half of the
        last bit if None.
    """
    shift, last = _LAYOUT[signed]
    bits = _blocks(in_memory_order(values.detach().float()).view(torch.int32))
    # Of values that are never negative a NaN may have the sign.
    magnitude = bits & 0x7FFFFFFF
    round_up = (1 << shift) - 1
    largest = magnitude.amax(1, keepdim=True).clamp(max=_LARGEST)
    bounds = largest + round_up & ~round_up
    added = (
        torch.tensor(1 << shift - 1, device="cpu")
        if noise is None
        else _blocks(noise >> 32 - shift)
    )
    # Sums of bits may pass 2^31, as they do without a sign in the kernel.
    code = ((magnitude.long() + added) >> shift) - ((bounds >> shift) - last)
    code = code.clamp(0 if signed else 1, last)
    if signed:
        code |= torch.where(bits < 0, 128, 0)
    code = _in_shape(code.to(torch.uint8), values)
    return code.view(torch.int8) if signed else code, bounds.flatten().view(torch.float32)


def noise(count: int, key: int) -> Tensor:
    """Numbers of `count` elements that are spread evenly over 32 bits, as int64.

    A Weyl sequence that starts at `key`.
    """
    return (torch.arange(count, device="cpu") * 0x9E3779B9 + key) & 0xFFFFFFFF


def round_at_random(values: Tensor, key: int) -> Tensor:
    """bfloat16 from float32 `values`, rounded up or down with a mean of the value."""
    flat = in_memory_order(values)
    bits = flat.view(torch.int32).long() & 0xFFFFFFFF
    noisy = bits + (noise(flat.numel(), key) >> 16)
    upper = torch.where(flat.isnan(), bits | 0x400000, noisy) >> 16 & 0xFFFF
    return _in_shape(upper.to(torch.int32).to(torch.int16).view(torch.bfloat16), values)
