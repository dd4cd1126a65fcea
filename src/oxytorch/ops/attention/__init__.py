"""Scaled dot-product attention over short sequences: two matrix products around our softmax.

torch's flash kernel for CPUs multiplies bfloat16 blocks that are small for oneDNN; as long as the
scores fit in memory, two batched products and one sweep of softmax take about half the time.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from ..softmax import softmax

MOST_SCORES = 64 << 20
"""Bytes of scores above which torch's flash kernel, which never stores them, is called."""


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute softmax(query @ key^T * scale + mask) @ value.

    Arguments, shapes and errors are those of `torch.nn.functional.scaled_dot_product_attention`:
    query [batch, heads, length, dim], key and value [batch, heads, keys, dim]; mask additive or
    boolean (True = take part), broadcastable to [batch, heads, length, keys].
    bfloat16 and float16 without gradients take this path; scores are rounded to that dtype, the
    softmax is computed in float32. Everything else is torch's own function.
    Source: Vaswani et al., Attention Is All You Need, 2017, equation 1.
    """
    if not _fits(query, key, value, dropout_p, enable_gqa, is_causal and attn_mask is not None):
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
    if is_causal:
        attn_mask = _causal_mask(query.shape[-2], key.shape[-2])
    if scale is None:
        scale = query.shape[-1] ** -0.5
    scores = torch.matmul(query, key.transpose(-2, -1))
    return torch.matmul(softmax(scores, scale, attn_mask), value)


def _fits(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    enable_gqa: bool,
    two_masks: bool,
) -> bool:
    if query.dtype not in (torch.bfloat16, torch.float16) or query.dim() != 4:
        return False
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
        return False
    same = query.dtype == key.dtype == value.dtype and key.shape[:3] == value.shape[:3]
    plain = query.device.type == "cpu" and not dropout_p and not enable_gqa and not two_masks
    if not same or not plain or query.shape[:2] != key.shape[:2]:
        return False
    length, keys = query.shape[-2], key.shape[-2]
    scores = query.shape[0] * query.shape[1] * length * keys * query.element_size()
    return length > 1 and 0 < scores <= MOST_SCORES


@functools.lru_cache(maxsize=8)
def _causal_mask(length: int, keys: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.ones(length, keys, dtype=torch.bool).tril()
