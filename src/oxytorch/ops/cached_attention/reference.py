"""Attention over a cache of keys and values in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..rotary_embedding import op as rotary_embedding

MOST_CODE = 127
"""Largest magnitude of a code of an int8 cache."""


def attended(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    mask: Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float | None,
    causal: bool,
) -> Tensor:
    """Attention of `query`, normalized and rotated, over the keys and values of a cache."""
    group = query.shape[1] // max(keys.shape[1], 1)
    keys, values = (t.repeat_interleave(group, dim=1) for t in (keys, values))
    scores = query @ keys.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return _mixed(_masked(scores, start, mask, window, causal), values, sinks)


def check_no_beams(beams: Tensor | None) -> None:
    if beams is not None:
        raise RuntimeError("cached_attention: expected beams without starts or rows of their own")


def check_room(start: int, length: int, capacity: int) -> None:
    """Raises RuntimeError unless positions start to start + length are in the cache."""
    if start < 0 or start + length > capacity:
        raise RuntimeError(
            f"cached_attention: expected start and length that fit the cache of {capacity} "
            f"positions, got start {start} and length {length}; make a larger cache"
        )


def sequences(
    batch: int, start: int, starts: Tensor | None, rows: Tensor | None
) -> list[tuple[int, int]]:
    """Of each sequence of a call the positions that the cache holds, and the row of the cache."""
    added = [0] if starts is None else starts.flatten().tolist()
    if len(added) == 1:
        added *= batch
    places = [*range(batch)] if rows is None else rows.tolist()
    if len(added) != batch or len(places) != batch or len({*places}) != batch:
        raise RuntimeError(
            f"cached_attention: expected start_tensor and cache_rows of {batch} numbers, rows all "
            f"different, got {added} and {places}"
        )
    return [(start + more, place) for more, place in zip(added, places, strict=True)]


def of_one(tensor: Tensor | None, sequence: int, dims: int) -> Tensor | None:
    """A sequence's part of a tensor; dims: of one that is not the same for all sequences."""
    if tensor is None or tensor.dim() < dims or tensor.shape[0] == 1:
        return tensor
    return tensor[sequence : sequence + 1]


def prepared(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    wide: torch.dtype,
) -> Tensor:
    """Rows of x as they take part: normalized, then rotated; in the dtype `wide`."""
    x = x.to(wide)
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.to(wide)
    if cos is not None and sin is not None:
        x = rotary_embedding.reference(x, cos.to(wide), sin.to(wide), interleaved)
    return x


def write(rows: Tensor, cache: Tensor, scales: Tensor | None, start: int) -> None:
    """Writes rows, in their wide dtype, into the cache from start on."""
    end = start + rows.shape[2]
    if scales is not None:
        largest = rows.abs().amax(-1)
        scales[:, :, start:end] = largest / MOST_CODE
        inverse = torch.where(largest > 0, MOST_CODE / largest, 0.0)
        rows = (rows * inverse.unsqueeze(-1)).round()
    cache[:, :, start:end] = rows.to(cache.dtype)


def read(
    cache: Tensor,
    scales: Tensor | None,
    start: int,
    length: int,
    beams: Tensor | None,
    wide: torch.dtype,
) -> Tensor:
    """What each sequence sees, in the dtype `wide`: [batch, kv_heads, start + length, head_dim]."""
    end = start + length

    def chosen(tensor: Tensor) -> Tensor:
        if beams is None:
            return tensor[:, :, :end]
        rows = torch.arange(tensor.shape[0], device=tensor.device)[:, None].repeat(1, end)
        rows[:, :start] = beams[:, :start]
        return tensor.transpose(1, 2)[rows, torch.arange(end, device=rows.device)].transpose(1, 2)

    rows = chosen(cache).to(wide)
    return rows if scales is None else rows * chosen(scales).to(wide).unsqueeze(-1)


def _masked(
    scores: Tensor, start: int, mask: Tensor | None, window: int | None, causal: bool
) -> Tensor:
    length, end = scores.shape[-2:]
    if mask is not None:
        mask = mask[..., :end]
        keep = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if keep else scores + mask
    position = start + torch.arange(length, device=scores.device)[:, None]
    at = torch.arange(end, device=scores.device)
    if causal:
        scores = scores.masked_fill(at > position, -math.inf)
    if window is not None:
        scores = scores.masked_fill(at <= position - window, -math.inf)
    return scores


def _mixed(scores: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
    """Values mixed by the softmax of scores, as [batch, length, heads * head_dim]."""
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1)
        top = torch.maximum(top, sink)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - top)
    result = (weights @ values) / total.masked_fill(total == 0.0, 1.0)
    return result.transpose(1, 2).flatten(2).contiguous()
