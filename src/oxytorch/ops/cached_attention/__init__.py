"""Attention over a cache of keys and values: norm, rotation, cache write and attention at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._binding import with_writing_kernel
from .._op import Cost, Sample, register
from .._samples import MEBI, values
from .reference import (
    attended,
    check_no_beams,
    check_room,
    of_one,
    prepared,
    read,
    sequences,
    write,
)

MOST_DIM = 256
"""Largest head_dim."""


@with_writing_kernel
def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    start: int,
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
    start_tensor: Tensor | None = None,
    cache_rows: Tensor | None = None,
) -> Tensor:
    """Writes key and value into the cache and attends over all that the cache then holds.

    Norm, rotation, scores, softmax and sums are float32. Where the processor multiplies pairs of
    bfloat16, query and exponentials are rounded to bfloat16 if query and cache are; with an int8
    cache they are rounded to 15 bits of the row's largest magnitude. There is no gradient. float64
    and other devices run plain PyTorch.

    Args:
        query: [batch, heads, length, head_dim], float32, bfloat16 or float16; head_dim is at most
            256 and dense, other strides are free: query, key and value may be views of one product.
        key, value: [batch, kv_heads, length, head_dim] of query's dtype; kv_heads divides heads,
            and each serves as many neighbouring query heads.
        key_cache, value_cache: [batch, kv_heads, capacity, head_dim] of bfloat16, float32 or int8,
            with dense head_dim. Positions start to start + length are written, those before are
            read; what lies behind is neither.
        start: number of positions that the cache already holds.
        key_scales, value_scales: float32 [batch, kv_heads, capacity], with an int8 cache only: a
            row is quantized values times its scale, the largest magnitude of the row over 127.
        cos, sin: [length, rotary_dim] or [batch, length, rotary_dim] of query's dtype or float32:
            rows of query and key are rotated as `rotary_embedding` does.
        interleaved: which elements are rotated together, as in `rotary_embedding`.
        query_norm, key_norm: [head_dim] of query's dtype or float32: before the rotation each row
            of query and key is divided by the root of its mean square plus eps, and multiplied by
            this.
        eps: of the norms.
        mask: broadcasts to [batch, heads, length, keys] with keys at least start + length; bool
            (True takes part), or added, of query's dtype or float32.
        beams: int32 or int64 [batch, at least start], dense in positions: position t of sequence b
            is read from row beams[b, t] of the cache, so that beam search copies indexes only.
            Positions from start on are the sequence's own. Not with several start_tensors or
            cache_rows.
        window: row i sees no position up to start + i - window.
        softcap: scores become softcap * tanh(scores / softcap) before masks.
        sinks: [heads] of query's dtype or float32: scores of a key without value that every row
            sees (after masks and softcap).
        scale: of scores; None means 1 / sqrt(head_dim).
        causal: row i sees up to position start + i.
        start_tensor: int64 of one element, or [batch] of one for each sequence: added to start when
            the call runs, so that a recorded call can be repeated, and sequences of their own
            lengths take one call.
        cache_rows: int64 [batch], the row of the cache that each sequence has, all different; then
            the cache may have more rows than the call has sequences.

    Returns a new dense [batch, length, heads * head_dim] of query's dtype. A row that sees no key
    is zero. With cache_rows, or with starts of their own, sequences have the very results that
    each has in a call of its own. Raises RuntimeError if a shape, dtype, stride or device does not
    fit, if an index of beams or cache_rows is not a row of the cache, or if the cache has no room.
    Source: Dao et al., FlashAttention, 2022, algorithm 1; softcap: Gemma 2, 2024, section 2; sinks:
    Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023, section 3.2.
    """
    if cache_rows is not None or (start_tensor is not None and start_tensor.numel() > 1):
        check_no_beams(beams)
        found = []
        for b, (own, row) in enumerate(sequences(len(query), start, start_tensor, cache_rows)):
            one, place = slice(b, b + 1), slice(row, row + 1)
            found.append(cached_attention(
                query[one], key[one], value[one], key_cache[place], value_cache[place], own,
                of_one(key_scales, row, 3), of_one(value_scales, row, 3), of_one(cos, b, 3),
                of_one(sin, b, 3), interleaved, query_norm, key_norm, eps, of_one(mask, b, 4),
                window=window, softcap=softcap, sinks=sinks, scale=scale, causal=causal,
            ))  # fmt: skip
        return torch.cat(found) if found else query.transpose(1, 2).flatten(2).clone()
    if start_tensor is not None:
        start += int(start_tensor)
    check_room(start, query.shape[2], key_cache.shape[2])
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    key = prepared(key, key_norm, eps, cos, sin, interleaved, wide)
    write(key, key_cache, key_scales, start)
    write(value.to(wide), value_cache, value_scales, start)
    query = prepared(query, query_norm, eps, cos, sin, interleaved, wide)
    keys = read(key_cache, key_scales, start, query.shape[2], beams, query.dtype)
    values = read(value_cache, value_scales, start, query.shape[2], beams, query.dtype)
    result = attended(query, keys, values, start, mask, window, softcap, sinks, scale, causal)
    return result.to(value.dtype)


def _fake(query: Tensor, *rest: object, **named: object) -> Tensor:
    batch, heads, length, head_dim = query.shape
    return query.new_empty(batch, length, heads * head_dim)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory").

    Caches of int8, and beams, have tests of their own.
    """
    narrow = dtype if dtype.itemsize > 2 else torch.bfloat16
    if size != "test":
        row_bytes = 2 * 8 * 128 * narrow.itemsize
        start = (MEBI // 4 if size == "cache" else 160 * MEBI) // row_bytes - 1
        inputs = _inputs(dtype, narrow, 1, 32, 8, 1, start, 128, room=0)
        yield Sample(f"1x32x1x{start}x128", inputs)
        return
    for cache in dict.fromkeys((narrow, torch.bfloat16, torch.float32)):
        name = str(cache).removeprefix("torch.")
        for heads, kv_heads, length, start, dim in (
            (4, 2, 1, 5, 64), (3, 3, 7, 130, 17), (8, 1, 1, 300, 80), (6, 2, 65, 64, 32),
            (2, 1, 3, 40, 256), (2, 2, 4, 0, 8),
        ):  # fmt: skip
            shape = f"2x{heads}x{length}x{start}x{dim}-{name}"
            yield Sample(shape, _inputs(dtype, cache, 2, heads, kv_heads, length, start, dim))
    args = _inputs(dtype, narrow, 2, 4, 2, 3, 50, 32)
    angles = torch.rand(2, 3, 12, device="cpu").repeat(1, 1, 2) * 6.2831853
    turned: dict[str, object] = {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
    norms: dict[str, object] = {
        "query_norm": torch.rand(32, device="cpu") + 0.5,
        "key_norm": torch.rand(32, device="cpu"),
    }
    kept = torch.rand(2, 1, 3, 53, device="cpu") > 0.4
    kept[0, :, 1] = False
    shape = "2x4x3x50x32"
    yield Sample(shape + "-rotated", args, turned)
    yield Sample(shape + "-interleaved", args, {**turned, "interleaved": True})
    yield Sample(shape + "-norms", args, {**norms, **turned, "eps": 1e-3})
    yield Sample(shape + "-kept", args, {"mask": kept})
    yield Sample(shape + "-added", args, {"mask": values(2, 4, 3, 53, dtype=dtype)})
    yield Sample(shape + "-all_keys", args, {"causal": False})
    yield Sample(shape + "-window", args, {"window": 9})
    yield Sample(shape + "-softcap", args, {"softcap": 2.0, "scale": 0.3})
    yield Sample(shape + "-sinks", args, {"sinks": values(4, dtype=dtype), "mask": kept})
    yield Sample(
        shape + "-start_tensor", (*args[:5], 30), {"start_tensor": torch.tensor([20], device="cpu")}
    )
    starts = {"start_tensor": torch.tensor([20, 3], device="cpu")}
    yield Sample(shape + "-start_tensors", (*args[:5], 30), {**starts, **turned, "window": 9})
    rows: dict[str, object] = {
        **starts,
        "cache_rows": torch.tensor([1, 0], device="cpu"),
        "mask": kept,
    }
    yield Sample(shape + "-cache_rows", (*args[:5], 30), rows)
    yield Sample("2x4x0x50x32", _inputs(dtype, narrow, 2, 4, 2, 0, 50, 32))


def _inputs(
    dtype: torch.dtype,
    cache: torch.dtype,
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    start: int,
    dim: int,
    room: int = 3,
) -> tuple[object, ...]:
    """Query, key and value as views of one product, and caches with NaN where no one reads.

    room: positions of the caches that are not written either.
    """
    joined = values(batch, length, heads + 2 * kv_heads, dim, dtype=dtype).transpose(1, 2)
    caches = [values(batch, kv_heads, start + length + room, dim, dtype=cache) for _ in "kv"]
    for one in caches:
        one[:, :, start:] = float("nan")
    return *torch.split(joined, [heads, kv_heads, kv_heads], dim=1), *caches, start


def cost(
    query: Tensor,
    key: Tensor,
    key_cache: Tensor,
    start: int,
    key_scales: Tensor | None,
    **rest: object,
) -> Cost:
    """Reads query, key, value and the positions up to theirs; writes theirs and the result."""
    batch, kv_heads, _, head_dim = key_cache.shape
    row = head_dim * key_cache.dtype.itemsize + (0 if key_scales is None else 4)
    end = start + query.shape[2]
    moved = 2 * query.nbytes + 2 * key.nbytes + 2 * batch * kv_heads * end * row
    return Cost(moved, 4 * query.numel() * end)


_WRITES = ("key_cache", "value_cache", "key_scales", "value_scales")
op = register(cached_attention, samples, cost, writes=_WRITES, fake=_fake)
