"""Weights of floats of 8 bits: every number at every level, and scales that are kept exactly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from harness import DTYPES, LEVELS
from torch import Tensor

from marks import NEEDS_LIBRARY
from oxytorch import isa
from oxytorch.ops.linear_panels import linear
from oxytorch.ops.panels import PanelWeight

CODES = torch.arange(256, dtype=torch.uint8)
VALUES = CODES.view(torch.float8_e4m3fn).float()

needs_library = NEEDS_LIBRARY


def _same(found: Tensor, wanted: Tensor) -> bool:
    return bool(((found == wanted) | (found.isnan() & wanted.isnan())).all())


@pytest.fixture(params=[False, True], ids=["", "denormals flushed"])
def flushed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch's setting for denormals, of which bfloat16 needs none for these numbers."""
    if request.param and not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    yield
    torch.set_flush_denormal(False)


@needs_library
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 12, 13, 40])
@pytest.mark.parametrize("short", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_every_number_is_multiplied_as_it_is(
    level: str, short: str, rows: int, flushed: None
) -> None:
    """A row of x is zero but for a one: the products are the weight's numbers, of all places."""
    weight = PanelWeight.from_codes(
        "fp8", CODES[:, None].repeat(1, 128), torch.ones(256, 1), dtype=torch.float32
    )
    for first in range(0, 128, 37):
        x = torch.zeros(rows, 128, dtype=DTYPES[short])
        x[torch.arange(rows), (first + 5 * torch.arange(rows)) % 128] = 1
        with isa.use(level):
            found = linear(x, weight)
        assert _same(found, VALUES.to(x.dtype).expand(rows, 256))


@needs_library
@pytest.mark.parametrize("level", LEVELS)
def test_neighbours_of_every_number_stay_apart(level: str) -> None:
    """Each place of a row has another number, so that none may stand for another."""
    codes = torch.stack([torch.randperm(256)[:64] for _ in range(32)]).to(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    weight = PanelWeight.from_codes("fp8", codes, torch.ones(32, 1), dtype=torch.float32)
    for rows in (64, 4):
        with isa.use(level):
            found = linear(torch.eye(64)[:rows].bfloat16(), weight)
        assert torch.equal(found, weight.dense().t()[:rows].bfloat16())


def test_plain_values_are_those_of_torch() -> None:
    weight = PanelWeight.from_codes("fp8", CODES.view(4, 64), torch.ones(4, 1), dtype=torch.float32)
    found = weight.dense().flatten()
    assert _same(found, VALUES)
    assert torch.equal(found.signbit()[:255], CODES[:255] >= 128)  # -0 is another one than 0
    assert torch.equal(weight.codes()[0], CODES.view(4, 64))


def test_writing_its_own_values_keeps_nan_and_the_rest_of_its_row() -> None:
    weight = PanelWeight.from_codes(
        "fp8", CODES.view(4, 64), torch.full((4, 1), 0.37), dtype=torch.float32
    )
    before = weight.codes()[0]
    values = weight.dense()
    weight.copy_(values)
    assert _same(weight.dense(), values) and weight.channel_scales.isfinite().all()  # type: ignore[union-attr]
    assert torch.equal(weight.codes()[0] & 0x7F, before & 0x7F)


@needs_library
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("group_size", [32, 128])
def test_scales_of_float32_are_kept_exactly(group_size: int, level: str) -> None:
    codes = torch.randint(0, 126, (40, 256), dtype=torch.uint8)
    scales = torch.rand(40, 256 // group_size) / 100
    weight = PanelWeight.from_codes("fp8", codes, scales, exact_scales=True, dtype=torch.float32)
    wanted = VALUES[codes.long()] * scales.repeat_interleave(group_size, 1)
    assert torch.equal(weight.dense(), wanted) and torch.equal(weight.codes()[1], scales)
    with isa.use(level):
        for rows in (2, 33):
            x = torch.randn(rows, 256)
            exact = x.double() @ wanted.double().t()
            assert (linear(x, weight) - exact).norm() < 1e-6 * exact.norm()


def test_scales_that_float16_holds_take_no_more() -> None:
    codes = torch.randint(0, 126, (40, 256), dtype=torch.uint8)
    scales = (torch.rand(40, 2) + 0.1).half().float()
    weights = [
        PanelWeight.from_codes("fp8", codes, scales * factor, exact_scales=True)
        for factor in (1.0, 2.0**-40, 0.3)
    ]
    assert [w.group_scales.dtype for w in weights] == [  # type: ignore[union-attr]
        torch.float16,
        torch.float16,
        torch.float32,
    ]
    for whole in (
        PanelWeight.joined([*weights, weights[0].part(0, 16)]),
        PanelWeight.joined([weights[2].part(0, 32), weights[0].part(0, 16)]),
    ):
        parts = whole.codes()[1]
        assert torch.equal(parts[-16:], scales[:16])
    assert torch.equal(whole.dense()[32:], weights[0].dense()[:16])
    gated = PanelWeight.gated(weights[0], weights[2])
    assert torch.equal(gated.dense(), torch.cat([weights[0].dense(), weights[2].dense()]))


def test_other_formats_keep_exact_scales_too() -> None:
    codes = torch.randint(0, 16, (16, 64), dtype=torch.uint8)
    scales = torch.rand(16, 2)
    weight = PanelWeight.from_codes("int4", codes, scales, exact_scales=True)
    assert torch.equal(weight.codes()[1], scales)
    assert not torch.equal(PanelWeight.from_codes("int4", codes, scales).codes()[1], scales)
