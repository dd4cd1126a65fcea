"""Scaled dot-product attention, block by block, without the scores ever leaving the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import isa
from .._autocast import Autocast
from .._binding import with_kernel
from .._op import Cost, Sample, nbytes, register
from .._samples import shape_name, values

MOST_DIM = 256
"""Head size that the kernel keeps in its buffers."""


@with_kernel
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    unseen_as_nan: bool = False,
) -> Tensor:
    """Returns softmax(query @ key^T * scale + mask) @ value.

    query: [batch, heads, length, dim], float32, bfloat16 or float16, dim at most 256.
    key, value: [batch, key_heads, keys, dim] of its dtype; key_heads divides heads, and each serves
        as many neighbouring query heads. Any strides; none costs a copy as long as dim is dense.
    mask: broadcasts to [batch, heads, length, keys]; bool (True takes part), or added, of the dtype
        of query or float32.
    scale: None means 1 / sqrt(dim).
    is_causal: row i sees keys 0 to i.

    Returns a new tensor of query's shape and dtype that lies in memory as [batch, length, heads,
    dim]. Scores, softmax and sums are float32; in bfloat16, where the processor multiplies pairs,
    exponentials are rounded to bfloat16 before they meet the values, as in torch. A row that sees
    no key is zero; with unseen_as_nan it is NaN, as where the formula is written out.
    float64 and other devices run plain PyTorch.
    Raises RuntimeError if a shape, dtype or device does not fit.
    Source: Vaswani et al., Attention Is All You Need, 2017, equation 1; Dao et al.,
    FlashAttention, 2022, algorithm 1.
    """
    group = query.shape[1] // max(key.shape[1], 1)
    if group > 1:
        key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    scores = torch.matmul(query, key.transpose(-2, -1)) * scale
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    unseen = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(unseen, 0.0), -1)
    weights = weights.masked_fill(unseen, math.nan if unseen_as_nan else 0.0)
    result = torch.matmul(weights.to(value.dtype), value)
    by_row = result.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return by_row.transpose(1, 2)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""

    def inputs(
        batch: int, heads: int, length: int, keys: int, dim: int, key_heads: int = 0
    ) -> tuple[Tensor, ...]:
        key_shape = (batch, keys, key_heads or heads, dim)
        shapes = ((batch, length, heads, dim), key_shape, key_shape)
        return tuple(values(*shape, dtype=dtype).transpose(1, 2) for shape in shapes)

    if size == "cache":
        yield Sample("1x12x128x64", inputs(1, 12, 128, 128, 64))
        return
    if size == "memory":
        yield Sample("8x12x512x64", inputs(8, 12, 512, 512, 64))
        return
    for shape in ((1, 1, 1, 1, 1), (2, 3, 5, 7, 8), (1, 2, 97, 33, 17), (1, 1, 7, 300, 64),
                  (1, 1, 200, 129, 40), (1, 2, 3, 2, 256), (0, 2, 3, 4, 8), (1, 2, 0, 4, 8),
                  (1, 2, 3, 0, 8)):  # fmt: skip
        yield Sample(shape_name(shape), inputs(*shape))
    yield Sample("2x6x9x140x16-grouped", inputs(2, 6, 9, 140, 16, key_heads=2))
    q, k, v = inputs(2, 3, 9, 140, 24)
    kept = torch.rand(2, 1, 1, 140, device="cpu") > 0.3
    kept[..., 0] = True
    added = values(2, 3, 9, 140, dtype=dtype)
    yield Sample("2x3x9x140x24-kept", (q, k, v, kept))
    yield Sample("2x3x9x140x24-added", (q, k, v, added, 0.3))
    yield Sample("2x3x9x140x24-added_wide", (q, k, v, added.float()))
    yield Sample("2x3x9x140x24-per_row", (q, k, v, values(9, 1, dtype=dtype)))
    yield Sample("2x3x9x140x24-causal", (q, k, v, None, None, True))
    yield Sample("2x3x9x140x24-causal_kept", (q, k, v, kept, None, True))
    yield Sample("2x3x150x140x24-causal", (*inputs(2, 3, 150, 140, 24), None, None, True))
    unseen = kept.expand(2, 3, 9, 140).clone()
    unseen[0, 1, 4] = False
    yield Sample("2x3x9x140x24-unseen", (q, k, v, unseen))
    yield Sample("2x3x9x140x24-unseen_as_nan", (q, k, v, unseen, None, False, True))
    late = kept.expand(2, 3, 9, 140).clone()
    late[..., :130] = False
    late[..., 130] = True
    yield Sample("2x3x9x140x24-late", (q, k, v, late))
    yield Sample("3x2x5x11-strided_dim", tuple(values(3, 2, 11, 5, dtype=dtype).mT for _ in "qkv"))
    yield Sample("1x2x33x270x96", inputs(1, 2, 33, 270, 96))
    yield Sample("1x1x300x300x24-causal", (*inputs(1, 1, 300, 300, 24), None, None, True))


def cost(query: Tensor, key: Tensor, **rest: object) -> Cost:
    """Reads query, key, value and mask, writes the result; two products."""
    moved = 2 * query.nbytes + key.nbytes + nbytes(rest)
    return Cost(moved, 4 * query.numel() * key.shape[2])


op = register(
    attention, samples, cost, autocast=Autocast("lower", ("query", "key", "value", "mask"))
)


def is_fast() -> bool:
    """Whether the kernel can beat torch's own at this level."""
    return isa.has("vectors_512")


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function of this name, by our op where that is faster, else by torch itself.

    Calls with gradients, dropout, other devices, dtypes or shapes than the op's go to torch.
    """
    if (
        _fits(query, key, value, enable_gqa)
        and not dropout_p
        and not (is_causal and attn_mask is not None)
        and not (is_causal and scale is not None and scale <= 0)  # NaN: torch scales -inf
        and (attn_mask is None or attn_mask.dtype in (torch.bool, torch.float32, query.dtype))
    ):
        return attention(query, key, value, attn_mask, scale, is_causal)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _fits(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16) or query.dim() != 4:
        return False
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
        return False
    same = query.dtype == key.dtype == value.dtype and key.shape == value.shape
    heads = key.shape[1] == query.shape[1] or (enable_gqa and key.dim() == 4)
    return (
        same
        and heads
        and query.shape[0] == key.shape[0]
        and query.shape[3] == key.shape[3] <= MOST_DIM
        and query.device.type == "cpu"
        and is_fast()
    )
