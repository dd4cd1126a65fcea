"""Attention over a cache: numbers at every level, what is written, what is read, and errors."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import LEVELS
from torch import Tensor
from torch.library import opcheck

from marks import NEEDS_LIBRARY
from oxytorch import isa, testing
from oxytorch.ops import cached_attention, registry
from oxytorch.ops.cached_attention.reference import attended, prepared, read

pytestmark = NEEDS_LIBRARY

FP32, BF16, FP16, INT8 = torch.float32, torch.bfloat16, torch.float16, torch.int8

reference = registry()["cached_attention"].reference


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


def seen(
    args: tuple[Any, ...], named: dict[str, Any], wide: torch.dtype, plain: bool = False
) -> Tensor:
    """What the query sees in a cache that the call has written, computed in the dtype `wide`.

    plain: as plain PyTorch does, with the rotated query rounded to its own dtype.
    """
    rest = dict(named)
    norm, _ = rest.pop("query_norm", None), rest.pop("key_norm", None)
    turn = [rest.pop(name, None) for name in ("cos", "sin")]
    query = prepared(args[0], norm, 1e-6, *turn, rest.pop("interleaved", False), wide)
    if plain:
        query = query.to(args[0].dtype).to(wide)
    caches = zip(args[3:5], ("key_scales", "value_scales"), strict=True)
    start, beams = args[5], rest.pop("beams", None)
    keys, values = (
        read(cache, rest.pop(scales, None), start, query.shape[2], beams, wide)
        for cache, scales in caches
    )
    given = [rest.get(name) for name in ("mask", "window", "softcap", "sinks", "scale")]
    return attended(query, keys, values, start, *given, rest.get("causal", True))


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
        largest = float(wanted.abs().max())
        torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=5e-4 * largest)
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
    plain = seen(args, named, FP32, plain=True).to(case.dtype)
    assert_right(case, actual, seen(args, named, torch.float64), plain)
    reference(*usual_args, **usual_named)
    scales = [name for name in ("key_scales", "value_scales") if name in named]
    ours = (*args[3:5], *(named[name] for name in scales))
    assert_written(case, ours, (*usual_args[3:5], *(usual_named[name] for name in scales)))


def _few(length: int = 3, **fields: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return call_of(Case(length=length, start=300, rotary=32, **fields))


def _positional(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments of the schema by position."""
    schema = torch.ops.oxytorch.cached_attention.default._schema
    rest = schema.arguments[len(args) :]
    return (*args, *(named.get(item.name, item.default_value) for item in rest))


@pytest.mark.parametrize("cache", [BF16, INT8])
def test_opcheck_accepts_the_op(cache: torch.dtype) -> None:
    opcheck(torch.ops.oxytorch.cached_attention.default, _positional(*_few(cache=cache)))


@pytest.mark.parametrize("shape", [(1, 1), (1,), ()])
def test_start_in_part_as_a_tensor_is_the_same_call(shape: tuple[int, ...]) -> None:
    args, named = _few()
    other, other_named = copied(args, named)
    usual = cached_attention(*args, **named)
    rest = torch.full(shape, args[5] - 2)
    again = cached_attention(*other[:5], 2, **other_named, start_tensor=rest)
    assert torch.equal(usual, again)
    assert torch.equal(args[3].nan_to_num(), other[3].nan_to_num())


OWN_STARTS = (3, 700, 0, 255, 256, 64)
OWN_ROWS = (5, 0, 3, 7, 1, 4)


def _own_lengths(length: int, cache: torch.dtype, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A call for sequences of their own lengths, in some rows of a cache that has more."""
    case = Case(heads=(8, 2), length=length, start=705, batch=8, rotary=32, norm=True, cache=cache)
    args, named = call_of(case)
    for cached in (*args[3:5], named.get("key_scales"), named.get("value_scales")):
        for row, start in zip(OWN_ROWS, OWN_STARTS, strict=True):
            if cached is not None and cached.dtype != INT8:
                cached[row, :, start:] = float("nan")
    new = [rows[: len(OWN_ROWS)] for rows in args[:3]]
    angles = {name: named[name][: len(OWN_ROWS)] for name in ("cos", "sin")}
    return (*new, *args[3:5]), {**named, **angles, **options}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"sinks": torch.randn(8)}], ids=str)
@pytest.mark.parametrize("length", [1, 3, 70])
@pytest.mark.parametrize("cache", [BF16, INT8])
def test_sequences_of_their_own_lengths_are_those_one_by_one(
    cache: torch.dtype, length: int, options: dict[str, Any], level: str
) -> None:
    args, named = _own_lengths(length, cache, **options)
    own, own_named = copied(args, named)
    starts, rows = torch.tensor(OWN_STARTS), torch.tensor(OWN_ROWS)
    named = {**named, "start_tensor": starts, "cache_rows": rows}
    together = at_level(level, (*args, 0), named)
    for b, (start, row) in enumerate(zip(OWN_STARTS, OWN_ROWS, strict=True)):
        alone = {**own_named, **{name: own_named[name][b : b + 1] for name in ("cos", "sin")}}
        for name in ("key_scales", "value_scales"):
            if name in alone:
                alone[name] = alone[name][row : row + 1]
        parts = [new[b : b + 1] for new in own[:3]] + [c[row : row + 1] for c in own[3:5]]
        assert torch.equal(at_level(level, (*parts, start), alone)[0], together[b])
    scales = [name for name in ("key_scales", "value_scales") if name in named]
    for ours, theirs in zip(
        (*args[3:5], *(named[name] for name in scales)),
        (*own[3:5], *(own_named[name] for name in scales)),
        strict=True,
    ):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_opcheck_accepts_sequences_of_their_own_lengths() -> None:
    args, named = _own_lengths(1, BF16)
    named |= {"start_tensor": torch.tensor(OWN_STARTS), "cache_rows": torch.tensor(OWN_ROWS)}
    opcheck(torch.ops.oxytorch.cached_attention.default, _positional((*args, 0), named))


def test_float64_runs_the_reference() -> None:
    args, named = call_of(Case(dtype=FP32, cache=FP32, start=20))
    wide = tuple(testing.widen(item) for item in args)
    result = cached_attention(*wide, **named)
    assert result.dtype == torch.float64
    plain = reference(*args, **named)
    testing.assert_close(cached_attention(*args, **named), result, plain)


@pytest.mark.parametrize("case", [Case(start=900), Case(length=150, start=40, cache=INT8)])
def test_repeats_bit_for_bit_with_any_number_of_threads(case: Case) -> None:
    args, named = call_of(case)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            own, own_named = copied(args, named)
            with testing.settings(split=True):
                results.append((cached_attention(*own, **own_named), own[3], own[4]))
    finally:
        torch.set_num_threads(before)
    for later in results[1:]:
        for one, other in zip(results[0], later, strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("level", LEVELS)
def test_positions_together_are_those_one_by_one(level: str) -> None:
    """Bit for bit: tokens that are checked several at a time are those that come one at a time."""
    args, named = call_of(Case(heads=(8, 2), length=4, start=254))
    new, start = args[:3], args[5]
    own, _ = copied(args, named)
    together = at_level(level, args, named)
    for i in range(4):
        rows = tuple(rows[:, :, i : i + 1] for rows in new)
        alone = at_level(level, (*rows, *own[3:5], start + i), named)
        assert torch.equal(alone[:, 0], together[:, i])


def _by_position(cache: Tensor) -> Tensor:
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("cache", [BF16, INT8])
@pytest.mark.parametrize("layout", [testing.misaligned, testing.padded_rows, _by_position])
def test_the_cache_may_lie_anyhow(layout: Any, cache: torch.dtype) -> None:
    args, named = _few(cache=cache)
    own, own_named = copied(args, named)
    moved = [layout(item, 3) if layout is testing.misaligned else layout(item) for item in own[3:5]]
    usual = cached_attention(*args, **named)
    assert torch.equal(usual, cached_attention(*own[:3], *moved, own[5], **own_named))
    for ours, other in zip(args[3:5], moved, strict=True):
        assert torch.equal(ours.nan_to_num(), other.nan_to_num())


ERRORS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "expected start and length that fit the cache of 306 positions, got start 305 and length 3;"
        " make a larger cache",
        {"start": 305},
        {},
    ),
    (
        "expected start and length that fit the cache of 306 positions, got start -1",
        {"start": -1},
        {},
    ),
    (
        "expected start_tensor of one int64, or of shape [2], got float32 of shape [2]",
        {},
        {"start_tensor": torch.ones(2)},
    ),
    (
        "expected start_tensor of one int64, or of shape [2], got int64 of shape [3]",
        {},
        {"start_tensor": torch.ones(3, dtype=torch.int64)},
    ),
    (
        "expected cache_rows with different rows of the cache, 0 to 1, got 1 twice",
        {},
        {"cache_rows": torch.ones(2, dtype=torch.int64)},
    ),
    (
        "expected cache_rows with different rows of the cache, 0 to 1, got 2",
        {},
        {"cache_rows": torch.tensor([0, 2])},
    ),
    (
        "expected cache_rows of int64 and of shape [2], got int32 of shape [2]",
        {},
        {"cache_rows": torch.tensor([0, 1], dtype=torch.int32)},
    ),
    ("expected query of shape [batch, heads, length, head_dim]", {"query": torch.ones(2, 3)}, {}),
    (
        "expected key of shape [2, kv_heads, 3, 64], got [2, 2, 4, 64]",
        {"key": torch.ones(2, 2, 4, 64, dtype=BF16)},
        {},
    ),
    (
        "expected key with a number of heads that divides the query's 4, got 3",
        {"key": torch.ones(2, 3, 3, 64, dtype=BF16), "value": torch.ones(2, 3, 3, 64, dtype=BF16)},
        {},
    ),
    ("expected value of dtype bfloat16, got float32", {"value": torch.ones(2, 2, 3, 64)}, {}),
    (
        "expected key_cache of dtype float32, bfloat16 or int8, got float16",
        {"key_cache": torch.ones(2, 2, 306, 64, dtype=FP16)},
        {},
    ),
    (
        "expected key_cache of shape [2, 2, capacity, 64], got [1, 2, 306, 64]",
        {"key_cache": torch.ones(1, 2, 306, 64, dtype=BF16)},
        {},
    ),
    (
        "expected key_cache with dense head_dim, got strides [39168, 19584, 1, 306]",
        {"key_cache": torch.ones(2, 2, 64, 306, dtype=BF16).mT},
        {},
    ),
    (
        "expected value_cache of shape [2, 2, 306, 64], got [2, 2, 305, 64]",
        {"value_cache": torch.ones(2, 2, 305, 64, dtype=BF16)},
        {},
    ),
    (
        "expected key_scales only beside a cache of int8, got a cache of bfloat16",
        {},
        {"key_scales": torch.ones(2, 2, 306)},
    ),
    ("expected sin and cos together, got cos without sin", {}, {"sin": None}),
    (
        "expected cos of shape [2, 3, 64], got [2, 4, 64]",
        {},
        {"cos": torch.ones(2, 4, 64), "sin": torch.ones(2, 4, 64)},
    ),
    (
        "expected cos with an even last dimension of at most 64, got [3, 66]",
        {},
        {"cos": torch.ones(3, 66), "sin": torch.ones(3, 66)},
    ),
    ("expected query_norm of shape [64], got [32]", {}, {"query_norm": torch.ones(32)}),
    ("expected sinks of shape [4], got [2]", {}, {"sinks": torch.ones(2)}),
    (
        "expected mask that broadcasts to shape [2, 4, 3, 303], got [3, 302]",
        {},
        {"mask": torch.ones(3, 302)},
    ),
    (
        "expected beams of shape [2, at least 300], got [2, 299]",
        {},
        {"beams": torch.zeros(2, 299, dtype=torch.int64)},
    ),
    (
        "expected beams with rows of the cache, 0 to 1, got 2",
        {},
        {"beams": torch.full((2, 300), 2)},
    ),
    (
        "expected beams with rows of the cache, 0 to 1, got -1",
        {},
        {"beams": torch.full((2, 300), -1, dtype=torch.int32)},
    ),
    ("expected beams of dtype int32 or int64, got float32", {}, {"beams": torch.ones(2, 300)}),
    ("expected window of at least 1, got 0", {}, {"window": 0}),
    ("expected softcap above 0, got -2", {}, {"softcap": -2.0}),
]


@pytest.mark.parametrize(("message", "changed", "options"), ERRORS, ids=[e[0][:50] for e in ERRORS])
def test_error_names_argument_and_both_values(
    message: str, changed: dict[str, Any], options: dict[str, Any]
) -> None:
    args, named = _few()
    names = ("query", "key", "value", "key_cache", "value_cache", "start")
    caches = [cache.clone() for cache in args[3:5]]
    call = [changed.get(name, value) for name, value in zip(names, args, strict=True)]
    with pytest.raises(RuntimeError, match=re.escape(f"cached_attention: {message}")):
        cached_attention(*call, **{**named, **options})
    for cache, before in zip(args[3:5], caches, strict=True):
        assert torch.equal(cache.nan_to_num(), before.nan_to_num())


def test_missing_scales_are_named() -> None:
    args, named = _few(cache=INT8)
    del named["value_scales"]
    with pytest.raises(
        RuntimeError, match="expected value_scales beside a cache of int8, got none"
    ):
        cached_attention(*args, **named)
