"""Properties of steps and formats over sizes, options and values that hypothesis picks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import CASES, LEVELS, MEASURED, make, train
from torch import Tensor

from oxytorch import isa
from oxytorch.ops.optimizer_step import formats

FAST = settings(max_examples=40, deadline=None, derandomize=True)

sizes = st.one_of(st.integers(0, 70), st.integers(250, 260), st.integers(1020, 1030))
shapes = st.lists(st.integers(1, 40), min_size=0, max_size=3)
seeds = st.integers(0, 2**31)
state_dtypes = st.sampled_from([None, torch.float32, torch.bfloat16, torch.int8])


def _values(count: int, seed: int, exponent: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator) * 10.0**exponent


@FAST
@given(sizes, seeds)
def test_halves_join_to_the_same_bits(count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    special = [
        0x7F800000,
        -0x800000,
        0x7FFFFFFF,
        -1,
        0x7F800001,
        0x7FC08000,
        0x8000,
        0x7FFF,
        -(2**31),
    ]
    bits = torch.cat([bits, torch.tensor(special, dtype=torch.int32)])
    values = bits.view(torch.float32)
    upper, low = formats.split(values)
    joined = formats.join(upper, low)
    is_nan = values.isnan()
    assert torch.equal(joined.view(torch.int32)[~is_nan], bits[~is_nan])
    assert joined[is_nan].isnan().all()
    assert upper[is_nan].isnan().all()
    # To the nearest, as layers under autocast have it, but for those between two.
    is_between = (bits & 0xFFFF) == 0x8000
    assert torch.equal(upper[~is_nan & ~is_between], values.bfloat16()[~is_nan & ~is_between])


@FAST
@given(sizes, seeds, st.floats(-20, 15), st.booleans())
def test_codes_are_near_and_come_out_the_same(
    count: int, seed: int, exponent: float, signed: bool
) -> None:
    values = _values(count, seed, exponent)
    values = values if signed else values.abs()
    codes, bounds = formats.encode(values, signed)
    decoded = formats.decode(codes, bounds)
    assert torch.equal(formats.decode(*formats.encode(decoded, signed)), decoded)
    # 3 or 4 bits of mantissa, of values that are not far below the largest of their block.
    largest = bounds.repeat_interleave(formats.CODE_BLOCK)[:count]
    is_near = values.abs() > largest * 2.0**-14
    step = 2.0**-3 if signed else 2.0**-4
    error = (decoded - values).abs()
    assert (error[is_near] <= step * values.abs()[is_near]).all()
    assert (error[~is_near] <= largest[~is_near] * 2.0**-14).all()


@FAST
@given(sizes, seeds, seeds)
def test_random_rounding_goes_to_a_neighbour(count: int, seed: int, key: int) -> None:
    values = _values(count, seed)
    rounded = formats.round_at_random(values, key)
    assert ((rounded.float() - values).abs() <= values.abs() * 2.0**-7).all()
    exact = values.bfloat16().float()
    assert torch.equal(formats.round_at_random(exact, key).float(), exact)


@FAST
@given(st.sampled_from(CASES), st.lists(shapes, min_size=1, max_size=3), state_dtypes, seeds)
def test_split_is_float32_and_depends_on_nothing_else(
    case: tuple[str, dict[str, Any]],
    several: list[list[int]],
    state_dtype: torch.dtype | None,
    seed: int,
) -> None:
    name, options = case
    generator = torch.Generator().manual_seed(seed)
    starts = [torch.randn(shape, generator=generator) for shape in several]
    wide = make(name, [s.clone() for s in starts], **options, state_dtype=state_dtype, seed=seed)
    halves = [formats.split(start)[0] for start in starts]
    split = make(
        name, halves, **options, master_weights="split", state_dtype=state_dtype, seed=seed
    )
    for half, start in zip(halves, starts, strict=True):
        split.set_master_weight(half, start)
    for half, wanted in zip(train(split, 3), train(wide, 3), strict=True):
        assert torch.equal(split.master_weight(half), wanted)


@FAST
@given(st.sampled_from([c for c in CASES if c[0] not in MEASURED]), shapes, seeds)
def test_an_update_does_not_depend_on_the_other_tensors_of_a_step(
    case: tuple[str, dict[str, Any]], shape: list[int], seed: int
) -> None:
    name, options = case
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    gradient = values.flip(0) if shape else -values
    together = make(name, [torch.ones(17, 3), values.clone(), torch.ones(300)], **options)
    alone = make(name, [values.clone()], **options)
    for _ in range(2):
        for optimizer in (together, alone):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter)
            one = optimizer.param_groups[0]["params"][optimizer is together]
            one.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(together.param_groups[0]["params"][1], alone.param_groups[0]["params"][0])


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -0x400000, -1, -0x10000])
@pytest.mark.parametrize("signed", [True, False])
def test_codes_keep_a_nan_whatever_its_bits_are(bits: int, signed: bool) -> None:
    values = torch.rand(700)
    values.view(torch.int32)[300] = bits
    assert values[300].isnan()
    decoded = formats.decode(*formats.encode(values, signed))
    assert decoded[300].isnan()
    assert decoded[:256].isfinite().all()
    assert decoded[512:].isfinite().all()


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -0x400000, -1, -0x10000])
@pytest.mark.parametrize("level", LEVELS)
def test_steps_keep_a_nan_in_codes_whatever_its_bits_are(bits: int, level: str) -> None:
    weight = torch.randn(4096)
    optimizer = make("Adam", [weight], state_dtype=torch.int8)
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.randn(4096)
    parameter.grad.view(torch.int32)[300] = bits
    with isa.use(level):
        optimizer.step()
    state = optimizer.state[parameter]
    for name in ("exp_avg", "exp_avg_sq"):
        decoded = formats.decode(state[name], state[name + "_scales"])
        assert decoded[300].isnan()
        assert decoded[512:].isfinite().all()
