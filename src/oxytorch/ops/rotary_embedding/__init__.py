"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._binding import with_kernel
from .._op import Cost, Sample, nbytes, register
from .._samples import MEBI, shape_name, values


@with_kernel
def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates pairs of elements of x by angles whose cosines and sines are given.

    x: [batch, heads, positions, head_dim], float32, bfloat16 or float16, any strides as long as the
    last dimension is contiguous (otherwise it is copied first).
    cos, sin: [positions, rotary_dim] or [batch, positions, rotary_dim], both the dtype of x or
    float32, rotary_dim even and at most head_dim. Elements beyond rotary_dim are copied.
    interleaved: pairs are (2 i, 2 i + 1), as in GPT-J, instead of (i, i + rotary_dim / 2), as in
    Llama and GPT-NeoX. cos and sin have a value for each element of a pair, in the same order.
    Returns a new contiguous tensor of x's shape and dtype. Computes in float32, rounds once.
    float64 and other devices run plain PyTorch.
    Raises RuntimeError if a shape, dtype or device does not fit.
    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021, eq. 34.
    """
    rotary_dim = cos.shape[-1]
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        other = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        other = torch.cat((-second, first), dim=-1)
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = (turned * cos + other * sin).to(x.dtype)
    return torch.cat((turned, rest), dim=-1).contiguous()


def _angles(*shape: int, dtype: torch.dtype, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Cosines and sines that agree within each pair."""
    half = torch.rand(*shape[:-1], shape[-1] // 2, device="cpu") * 6.2831853
    angles = half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    if size != "test":
        positions = (MEBI // 4 if size == "cache" else 160 * MEBI) // (12 * 64 * dtype.itemsize)
        x = values(1, positions, 12, 64, dtype=dtype).transpose(1, 2)
        yield Sample(shape_name(x.shape), (x, *_angles(positions, 64, dtype=dtype)))
        return
    for width in (2, 6, 16, 32, 34, 64, 96, 130):
        shape = (2, 3, 5, width)
        x = values(*shape, dtype=dtype)
        yield Sample(shape_name(shape), (x, *_angles(5, width, dtype=dtype)))
        pairs = _angles(5, width, dtype=dtype, interleaved=True)
        yield Sample(shape_name(shape) + "-interleaved", (x, *pairs, True))
    x = values(2, 5, 3, 40, dtype=dtype).transpose(1, 2)
    yield Sample("2x3x5x40-transposed", (x, *_angles(5, 40, dtype=dtype)))
    yield Sample("2x3x5x40-partial", (x, *_angles(5, 24, dtype=dtype)))
    pairs = _angles(5, 24, dtype=dtype, interleaved=True)
    yield Sample("2x3x5x40-partial_interleaved", (x, *pairs, True))
    yield Sample("2x3x5x40-batched_angles", (x, *_angles(2, 5, 40, dtype=dtype)))
    yield Sample("2x3x5x40-wide_angles", (x, *_angles(1, 5, 40, dtype=torch.float32)))
    x = values(2, 3, 40, 5, dtype=dtype).transpose(2, 3)
    yield Sample("2x3x5x40-strided_last", (x, *_angles(5, 40, dtype=dtype)))
    yield Sample("0x3x5x40", (x[:0], *_angles(5, 40, dtype=dtype)))


def cost(x: Tensor, **rest: object) -> Cost:
    """Reads x, cos and sin, writes the result."""
    return Cost(2 * x.nbytes + nbytes(rest), 3 * x.numel())


op = register(rotary_embedding, samples, cost)
