"""Attention over a cache of keys and values: norm, rotation, cache write and attention at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._binding import bind_mutating, entry
from .reference import reference

CACHE_DTYPES = (torch.bfloat16, torch.float32, torch.int8)
"""Element types of a cache; int8 has scales beside it."""

MOST_DIM = 256
"""Largest head_dim."""


def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    start: int | Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
    mask: Tensor | None = None,
    beams: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
) -> Tensor:
    """Writes key and value into the cache and attends over all that the cache then holds.

    query: [batch, heads, length, head_dim], float32, bfloat16 or float16, head_dim at most 256.
    key, value: [batch, kv_heads, length, head_dim] of its dtype; kv_heads divides heads, and each
    serves as many neighbouring query heads. Any strides; none costs a copy as long as head_dim is
    dense: the three may be views of one product.
    key_cache, value_cache: [batch, kv_heads, capacity, head_dim] of bfloat16, float32 or int8, with
    dense head_dim. Positions start to start + length are written, those before are read; what lies
    behind is neither. key_scales, value_scales: float32 [batch, kv_heads, capacity], with an int8
    cache only: a row is codes times its scale, the largest magnitude of the row over 127.
    start: number of positions that the cache already holds. As an int64 tensor of one element it is
    read when the call runs, so that a recorded call can be repeated.
    query_norm, key_norm: [head_dim] of query's dtype or float32: before the rotation each row of
    query and key is divided by the root of its mean square plus eps, and multiplied by this.
    cos, sin: [length, rotary_dim] or [batch, length, rotary_dim] of query's dtype or float32: each
    row of query and key is rotated as `rotary_embedding` does; `interleaved` as there.
    mask: broadcasts to [batch, heads, length, keys] with keys at least start + length; bool (True
    takes part), or added, of query's dtype or float32. causal: row i sees up to position start + i.
    window: row i sees no position up to start + i - window.
    beams: int32 or int64 [batch, at least start]: position t of sequence b is read from row
    beams[b, t] of the cache, so that beam search copies indexes only. Positions from start on are
    the sequence's own.
    softcap: scores become softcap * tanh(scores / softcap) before masks. sinks: [heads] of query's
    dtype or float32, scores of a key without value that every row sees (after masks and softcap).
    scale: of scores, None means 1 / sqrt(head_dim).
    Returns a new dense [batch, length, heads * head_dim] of query's dtype. Norm, rotation, scores,
    softmax and sums are float32. Where the processor multiplies pairs of bfloat16, query and
    exponentials are rounded to bfloat16 if query and cache are; with an int8 cache they are rounded
    to 15 bits of the row's largest magnitude. A row that sees no key is zero.
    There is no gradient. float64 and other devices run `reference`.
    Raises RuntimeError if a shape, dtype, stride or device does not fit, if an index of beams is
    not a row of the cache, or if the cache has no room.
    Source: Dao et al., FlashAttention, 2022, algorithm 1; softcap: Gemma 2, 2024, section 2; sinks:
    Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023, section 3.2.
    """
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
        raise RuntimeError("cached_attention: has no gradient; call it under torch.no_grad()")
    first, tensor = (0, start) if isinstance(start, Tensor) else (start, None)
    result: Tensor = _call(
        query, key, value, key_cache, value_cache, first, key_scales, value_scales, cos, sin,
        interleaved, query_norm, key_norm, eps, mask, beams, window, softcap, sinks, scale, causal,
        tensor,
    )  # fmt: skip
    return result


def _fake(query: Tensor, *rest: Any, **named: Any) -> Tensor:
    batch, heads, length, head_dim = query.shape
    return query.new_empty(batch, length, heads * head_dim)


_call = entry("cached_attention", reference)

bind_mutating("cached_attention", reference, _fake)
