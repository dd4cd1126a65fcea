"""Attention over a cache: numbers at every level, what is written, what is read, and errors."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import LEVELS
from torch import Tensor

from oxytorch import _library, isa, testing
from oxytorch.ops import cached_attention
from oxytorch.ops.cached_attention.reference import attended, prepared, reference

pytestmark = pytest.mark.skipif(
    not _library.loaded, reason=f"no compiled library: {_library.why_missing}"
)

FP32, BF16, FP16, INT8 = torch.float32, torch.bfloat16, torch.float16, torch.int8


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: shapes, the cache, and what else takes part."""

    heads: tuple[int, int] = (4, 2)
    length: int = 1
    start: int = 0
    dim: int = 64
    batch: int = 2
    dtype: torch.dtype = BF16
    cache: torch.dtype = BF16
    rotary: int = 0
    interleaved: bool = False
    norm: bool = False
    mask: str = ""
    beams: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    sinks: bool = False

    @property
    def name(self) -> str:
        """What differs from the usual call."""
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(f"{field.name}={value}".replace("torch.", ""))
        return "-".join(parts) or "usual"


def _cases() -> Iterator[Case]:
    for dtype, cache in ((BF16, BF16), (BF16, INT8), (FP32, FP32), (FP32, BF16), (FP32, INT8),
                         (FP16, BF16), (BF16, FP32)):  # fmt: skip
        own = {"dtype": dtype, "cache": cache}
        yield Case(start=5, **own)
        yield Case(length=7, start=130, rotary=64, **own)
        yield Case(heads=(16, 1), length=3, start=300, norm=True, rotary=32, **own)
    for cache in (BF16, INT8, FP32):
        yield Case(heads=(8, 1), start=700, cache=cache)
        yield Case(heads=(3, 3), length=300, start=20, dim=80, rotary=32, cache=cache)
        yield Case(start=300, beams=True, rotary=64, cache=cache)
        yield Case(length=70, start=65, mask="padding", cache=cache)
        yield Case(start=600, options=(("window", 100),), cache=cache)
    for dim in (8, 17, 64, 80, 96, 128, 256):
        yield Case(dim=dim, start=70, batch=1)
        yield Case(dim=dim, length=33, start=70, batch=1, cache=INT8)
    for length in (1, 2, 63, 64, 65, 129):
        yield Case(length=length)
        yield Case(length=length, start=64, heads=(6, 2), dim=32)
    yield Case(length=4, start=9, rotary=32, interleaved=True)
    yield Case(length=4, start=9, rotary=64, norm=True, dtype=FP32)
    yield Case(length=200, start=100, heads=(2, 1), options=(("window", 37),))
    yield Case(length=3, start=40, mask="added")
    yield Case(length=3, start=40, mask="per_head", dtype=FP32, cache=FP32)
    yield Case(start=40, mask="wide", heads=(8, 8))
    yield Case(length=90, start=0, options=(("causal", False),))
    yield Case(length=5, start=90, options=(("softcap", 2.0), ("scale", 0.3)))
    yield Case(length=5, start=400, sinks=True, heads=(8, 2))
    yield Case(length=5, start=40, sinks=True, mask="unseen", heads=(8, 2))
    yield Case(length=5, start=40, mask="unseen", heads=(8, 2))
    yield Case(length=2, start=30, beams=True, batch=4, dim=40, cache=INT8)


CASES = list(_cases())


def _mask(case: Case) -> Tensor | None:
    keys = case.start + case.length
    if case.mask == "padding":
        mask = torch.ones(case.batch, 1, 1, keys + 9, dtype=torch.bool)
        mask[1, ..., :11] = False
        return mask
    if case.mask == "added":
        return torch.randn(case.batch, 1, case.length, keys).to(case.dtype)
    if case.mask == "per_head":
        return torch.randn(case.heads[0], case.length, keys)
    if case.mask == "wide":
        return torch.randn(1, case.heads[0], 1, keys)
    if case.mask == "unseen":
        mask = torch.rand(case.batch, 1, case.length, keys) > 0.4
        mask[0, :, 1] = False
        return mask
    return None


def call_of(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments, with a cache whose positions from `start` on hold what no one may read."""
    torch.manual_seed(zlib.crc32(repr(case).encode()))
    heads, kv_heads = case.heads
    # Views of one product, as a model has them.
    joined = torch.randn(case.batch, case.length, (heads + 2 * kv_heads) * case.dim).to(case.dtype)
    rows = joined.unflatten(-1, (-1, case.dim)).transpose(1, 2)
    query, key, value = rows.split((heads, kv_heads, kv_heads), dim=1)
    capacity = case.start + case.length + 3
    named: dict[str, Any] = dict(case.options)
    caches = []
    for name in ("key_scales", "value_scales"):
        shape = (case.batch, kv_heads, capacity, case.dim)
        if case.cache == INT8:
            caches.append(torch.randint(-127, 128, shape, dtype=INT8))
            scales = torch.rand(shape[:3]) * 0.02
            scales[:, :, case.start :] = float("nan")
            named[name] = scales
        else:
            cache = torch.randn(shape).to(case.cache)
            cache[:, :, case.start :] = float("nan")
            caches.append(cache)
    if case.rotary:
        angles = torch.rand(case.batch, case.length, case.rotary // 2) * 6.28
        both = angles.repeat_interleave(2, -1) if case.interleaved else torch.cat((angles,) * 2, -1)
        named |= {"cos": both.cos().to(case.dtype), "sin": both.sin().to(case.dtype)}
        named["interleaved"] = case.interleaved
    if case.norm:
        named |= {"query_norm": torch.rand(case.dim) + 0.5, "key_norm": torch.rand(case.dim) + 0.5}
    if case.beams:
        named["beams"] = torch.randint(0, case.batch, (case.batch, capacity), dtype=torch.int32)
    if case.sinks:
        named["sinks"] = torch.randn(heads)
    named["mask"] = _mask(case)
    return (query, key, value, *caches, case.start), named


def copied(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with a cache of its own."""
    caches = [cache.clone() for cache in args[3:5]]
    scales = {name: named[name].clone() for name in ("key_scales", "value_scales") if name in named}
    return (*args[:3], *caches, *args[5:]), {**named, **scales}


def seen(args: tuple[Any, ...], named: dict[str, Any], wide: torch.dtype) -> Tensor:
    """What the query sees in a cache that the call has written, computed in the dtype `wide`."""
    rest = dict(named)
    norm, _ = rest.pop("query_norm", None), rest.pop("key_norm", None)
    turn = [rest.pop(name, None) for name in ("cos", "sin")]
    query = prepared(args[0], norm, 1e-6, *turn, rest.pop("interleaved", False), wide)
    return attended(query, *args[3:], **rest)


def at_level(level: str, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """Calls the op; fails if it was not really that level's code that ran."""
    with torch.no_grad(), isa.use(level):
        isa.forget_last_called()
        result = cached_attention(*args, **named)
        assert isa.last_called() == level
    return result


def assert_right(case: Case, actual: Tensor, wanted: Tensor, plain: Tensor) -> None:
    """As every op's numbers; weights over an int8 cache are rounded to 15 bits, also in float32."""
    if case.cache == INT8 and case.dtype == FP32:
        typical = wanted.square().mean().sqrt()
        torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=float(1e-3 * typical))
    else:
        testing.assert_close(actual, wanted, plain, case.name)


def assert_written(case: Case, ours: tuple[Any, ...], usual: tuple[Any, ...]) -> None:
    """New rows are those of the reference up to rounding; all else is as it was."""
    rows = slice(case.start, case.start + case.length)
    for cache, wanted in zip(ours, usual, strict=True):
        for kept in (slice(0, case.start), slice(rows.stop, None)):
            assert torch.equal(cache[:, :, kept].nan_to_num(), wanted[:, :, kept].nan_to_num())
        found, right = cache[:, :, rows].double(), wanted[:, :, rows].double()
        step = 1.0 if cache.dtype == INT8 else torch.finfo(cache.dtype).eps * right.abs() + 1e-6
        assert ((found - right).abs() <= step).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_numbers(case: Case, level: str) -> None:
    args, named = call_of(case)
    usual_args, usual_named = copied(args, named)
    with testing.settings(split=True, guard=64):
        actual = at_level(level, args, named)
        testing.assert_guarded(actual, 64)
    assert actual.is_contiguous()
    plain = seen(args, named, FP32).to(case.dtype)
    assert_right(case, actual, seen(args, named, torch.float64), plain)
    reference(*usual_args, **usual_named)
    scales = [name for name in ("key_scales", "value_scales") if name in named]
    ours = (*args[3:5], *(named[name] for name in scales))
    assert_written(case, ours, (*usual_args[3:5], *(usual_named[name] for name in scales)))
