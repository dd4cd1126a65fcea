"""Products of few rows with weights in panels: every count of rows, hostile rows, group sizes."""

from __future__ import annotations

import pytest
import torch
from harness import DTYPES, LEVELS, arguments, call

from marks import NEEDS_LIBRARY
from oxytorch import isa, ops, testing
from oxytorch.ops import Op, Sample
from oxytorch.ops.linear_panels import linear
from oxytorch.ops.panels import PanelWeight
from oxytorch.ops.panels.formats import CODES, FORMATS
from oxytorch.ops.quantize_weight import quantize_weight

pytestmark = NEEDS_LIBRARY


def weight_of(
    format: str, out: int, inputs: int, group_size: int | None = None, symmetric: bool = True
) -> PanelWeight:
    values = torch.randn(out, inputs) / inputs**0.5
    if not FORMATS[format].has_codes:
        return PanelWeight.from_dense(values, format)
    return PanelWeight.from_codes(
        format,
        *quantize_weight(
            values + 0.02, format, group_size, symmetric or FORMATS[format].middle is None, False
        ),
    )


def sample_of(weight: PanelWeight, x: torch.Tensor) -> tuple[Op, Sample]:
    scales = weight.channel_scales, weight.group_scales, weight.zero_points
    args = (x, weight.format, weight.packed, *scales, weight.outputs)
    return ops.registry()["linear_panels"], Sample("", args)


def check(weight: PanelWeight, x: torch.Tensor, level: str, finite_rows: slice) -> torch.Tensor:
    """Compares the rows with the reference in float64; returns all of the result."""
    op, sample = sample_of(weight, x)
    exact = op.reference(*testing.widen(sample.args))[finite_rows]
    plain = op.reference(*sample.args)[finite_rows]
    (result,) = call(op, arguments(op, sample), level)
    testing.assert_close(result[finite_rows], exact, plain, f"{op.name} at {level}")
    return result


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("format", FORMATS)
def test_every_number_of_rows_gives_the_same_kind_of_result(format: str, level: str) -> None:
    weight = weight_of(format, 40, 192, 64 if FORMATS[format].has_codes else None)
    for rows in range(1, 15):
        check(weight, torch.randn(rows, 192).bfloat16(), level, slice(None))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
@pytest.mark.parametrize("symmetric", [True, False])
def test_group_sizes(group_size: int, symmetric: bool, level: str) -> None:
    for format in CODES:
        weight = weight_of(format, 20, 512, group_size, symmetric)
        for short in DTYPES:
            check(weight, torch.randn(3, 512).to(DTYPES[short]), level, slice(None))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_stays_in_its_row(format: str, level: str) -> None:
    weight = weight_of(format, 33, 256)
    x = torch.randn(5, 256).bfloat16()
    x[0, 7], x[4, 200] = torch.nan, torch.inf
    result = check(weight, x, level, slice(1, 4))
    assert result[0].isnan().all() and not result[4].isfinite().any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation_dtype", [None, "int8"])
def test_rows_of_any_magnitude(format: str, level: str, activation_dtype: str | None) -> None:
    weight = weight_of(format, 33, 256)
    weight.activation_dtype = activation_dtype if FORMATS[format].middle is not None else None
    x = torch.randn(4, 256).bfloat16()
    x[0] = 0
    x[1] *= 1e-32
    x[2] *= 1e28
    with isa.use(level), torch.no_grad():
        result = linear(x, weight)
        again = linear(torch.cat([x] * 4)[3:], weight)
    assert not result[0].any() and result.isfinite().all()
    for row in (2, 3):
        exact = x[row].double() @ weight.dense().double().t()
        # The second comes from the kernels for many rows.
        for found in (result[row], again[1 + row]):
            error = (found.double() - exact).square().mean().sqrt()
            assert error < 0.02 * exact.square().mean().sqrt()


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_with_an_outlier_keeps_the_others(level: str) -> None:
    weight = weight_of("int4", 64, 1024, 128)
    x = torch.randn(1, 1024).bfloat16()
    x[0, 5] = 200.0
    check(weight, x, level, slice(None))


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_token_may_choose_an_expert_twice(tokens: int) -> None:
    """Its shares add up; the row of a single token is staged for each of them."""
    gate_up = [PanelWeight.gated(weight_of("bf16", 32, 64), weight_of("bf16", 32, 64))] * 3
    down = [weight_of("bf16", 64, 32)] * 3
    x, twice = torch.randn(tokens, 64), torch.full((tokens, 2), 1)

    def product(shares: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        parts = (
            ("bf16", [weight.packed for weight in part], [], [], []) for part in (gate_up, down)
        )
        first, second = parts
        result: torch.Tensor = torch.ops.oxytorch.moe(x, shares, indices, *first, *second, 32)
        return result

    found = product(torch.tensor([[0.25, 0.75]] * tokens), twice)
    torch.testing.assert_close(found, product(torch.ones(tokens, 1), twice[:, :1]))
