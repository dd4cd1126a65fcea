"""Products of many rows with weights in panels: where blocks, chunks and tiles end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import LEVELS, arguments, call
from torch import Tensor

from marks import NEEDS_LIBRARY
from oxytorch import isa, ops, testing
from oxytorch.ops import Op, Sample
from oxytorch.ops.linear_panels import linear
from oxytorch.ops.moe import Experts, routed_mlp
from oxytorch.ops.panels import PanelWeight
from oxytorch.ops.panels.formats import FORMATS
from oxytorch.ops.quantize_weight import quantize_weight

pytestmark = NEEDS_LIBRARY

# rows, in_features, out_features, format, group_size, symmetric, epilogue, activation
CALLS: tuple[tuple[int, int, int, str, int | None, bool, str, str | None], ...] = (
    (13, 96, 40, "fp32", None, True, "gelu_mul", None),
    (37, 300, 70, "fp32", None, True, "add", None),
    (300, 97, 33, "fp32", None, True, "tanh", None),
    (16, 1024, 64, "bf16", None, True, "none", None),
    (49, 1090, 65, "bf16", None, True, "add", None),
    (289, 64, 31, "bf16", None, True, "silu_mul", None),
    (17, 2050, 40, "int8", None, False, "gelu", None),
    (33, 1152, 80, "int8", 128, False, "none", None),
    (100, 1100, 50, "int8", None, True, "silu_mul", "int8"),
    (48, 512, 33, "int8", 256, False, "relu", "int8"),
    (50, 96, 130, "int4", 32, False, "none", "int8"),
    (21, 704, 16, "int4", None, False, "none", "int8"),
    (97, 256, 100, "int4", 64, True, "gelu_tanh_mul", "int8"),
    (53, 1280, 24, "int4", 128, False, "silu", None),
    (300, 160, 17, "int4", 32, True, "none", None),
    (35, 512, 48, "nf4", 256, True, "gelu_mul", None),
    (12, 300, 70, "nf4", None, True, "none", None),
    (5, 384, 33, "fp8", 128, True, "add", None),
    (19, 1090, 65, "fp8", None, True, "none", None),
    (35, 512, 48, "fp8", 256, True, "silu_mul", None),
    (130, 288, 100, "fp8", 32, True, "gelu", None),
    (600, 97, 130, "bf16", None, True, "gelu", None),
    (129, 800, 200, "bf16", None, True, "none", None),
    (130, 350, 100, "int8", None, True, "none", None),
)


def _weight(
    out_features: int, in_features: int, format: str, group_size: int | None, symmetric: bool
) -> PanelWeight:
    values = torch.randn(out_features, in_features) / in_features**0.5
    if not FORMATS[format].has_codes:
        return PanelWeight.from_dense(values, format)
    codes = quantize_weight(
        values + 0.02, format, group_size, symmetric or FORMATS[format].middle is None, False
    )
    return PanelWeight.from_codes(format, *codes)


def _arguments(index: int, dtype: torch.dtype) -> tuple[Any, ...]:
    torch.manual_seed(index)
    rows, width, outputs, format, group_size, symmetric, epilogue, activation = CALLS[index]
    weight = _weight(outputs, width, format, group_size, symmetric)
    if epilogue.endswith("_mul"):
        weight = PanelWeight.gated(weight, _weight(outputs, width, format, group_size, symmetric))
    weight.activation_dtype = activation
    bias = torch.randn(weight.shape[0]).to(dtype)
    other = torch.randn(rows, outputs).to(dtype) if epilogue == "add" else None
    return torch.randn(rows, width).to(dtype), weight, bias, other, epilogue


def _sample(index: int, dtype: torch.dtype) -> tuple[Op, Sample]:
    x, weight, bias, other, epilogue = _arguments(index, dtype)
    scales = weight.channel_scales, weight.group_scales, weight.zero_points
    rest = CALLS[index][2], bias, other, epilogue, weight.activation_dtype or "none"
    args = (x, weight.format, weight.packed, *scales, *rest)
    return ops.registry()["linear_panels"], Sample(f"call{index}", args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("index", range(len(CALLS)), ids=[f"{c[0]}-{c[3]}-{c[7]}" for c in CALLS])
def test_many_rows_agree_with_the_reference_at_every_level(index: int, dtype: torch.dtype) -> None:
    op, sample = _sample(index, dtype)
    exact = op.reference(*testing.widen(sample.args))
    plain = op.reference(*sample.args)
    for level in LEVELS:
        with testing.settings(split=True):
            (result,) = call(op, arguments(op, sample), level)
        testing.assert_close(result, exact, plain, f"{op.name} at {level}")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("format", "group_size", "symmetric"),
    [("int4", 64, False), ("int4", 128, True), ("int4", None, False), ("int8", 256, False),
     ("int8", None, True)],
)  # fmt: skip
def test_up_to_32_rows_times_codes_have_the_sums_that_each_has_alone(
    format: str, group_size: int | None, symmetric: bool, level: str
) -> None:
    torch.manual_seed(0)
    bias, other = torch.randn(400).bfloat16(), torch.randn(32, 400).bfloat16()
    with isa.use(level):
        if not isa.has("int8_dot"):
            pytest.skip("sums are of float32")
        for width in (192 if group_size == 64 else 256, 2048):
            weight = _weight(400, width, format, group_size, symmetric)
            x = torch.randn(32, width).bfloat16()
            alone = [
                linear(x[row : row + 1], weight, bias, epilogue="add", other=other[row : row + 1])
                for row in range(32)
            ]
            for rows in (9, 16, 23, 32):
                found = linear(x[:rows], weight, bias, epilogue="add", other=other[:rows])
                assert torch.equal(found, torch.cat(alone[:rows])), (width, rows)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_in_short_groups_8_rows_have_the_sums_that_each_has_alone(
    symmetric: bool, level: str
) -> None:
    torch.manual_seed(0)
    weight, x = _weight(400, 2048, "int4", 32, symmetric), torch.randn(8, 2048).bfloat16()
    with isa.use(level):
        if not isa.has("int8_dot"):
            pytest.skip("sums are of float32")
        alone = [linear(x[row : row + 1], weight) for row in range(8)]
        for rows in (2, 5, 8):
            assert torch.equal(linear(x[:rows], weight), torch.cat(alone[:rows])), rows


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("format", ["int4", "int8"])
def test_experts_give_tokens_what_each_gets_alone(format: str, level: str) -> None:
    torch.manual_seed(0)
    pairs = [[_weight(64, 128, format, 64, False) for _ in "gu"] for _ in range(4)]
    gate_up = [PanelWeight.gated(*pair) for pair in pairs]
    down = [_weight(128, 64, format, 64, False) for _ in range(4)]
    x = torch.randn(32, 128).bfloat16()
    weights, indices = torch.randn(32, 4).softmax(-1).topk(2)
    with isa.use(level):
        if not isa.has("int8_dot"):
            pytest.skip("sums are of float32")
        found = routed_mlp(x, weights, indices, gate_up, down)
        for row in range(0, 32, 3):
            mine = slice(row, row + 1)
            alone = routed_mlp(x[mine], weights[mine], indices[mine], gate_up, down)
            assert torch.equal(found[mine], alone), row


def _where_rows_lie(x: Tensor) -> dict[str, Tensor]:
    rows, width = x.shape
    wide = torch.full((rows, 3 * width), torch.nan, dtype=x.dtype)
    wide[:, width : 2 * width] = x
    shifted = torch.full((rows * width + 1,), torch.nan, dtype=x.dtype)
    shifted[1:] = x.flatten()
    return {
        "contiguous": x,
        "columns of a wider one": wide[:, width : 2 * width],
        "misaligned": shifted[1:].view(rows, width),
    }


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [15, 16, 17, 33, 47, 129, 289, 303, 577])
def test_rows_are_read_where_they_lie(rows: int, level: str) -> None:
    torch.manual_seed(rows)
    for width in (32, 40, 96, 288, 1056):
        values, x = torch.randn(40, width), torch.randn(rows, width).bfloat16()
        weight = PanelWeight.from_dense(values.bfloat16(), "bf16")
        want = x.double() @ values.bfloat16().double().t()
        for name, lies in _where_rows_lie(x).items():
            with isa.use(level):
                found = linear(lies, weight)
            error = (found.double() - want).abs() / (want.abs() + width**0.5)
            assert error.max() < 2**-7, (name, width)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    """Threads change how rows are split into chunks."""
    for index in range(len(CALLS)):
        x, weight, bias, other, epilogue = _arguments(index, torch.bfloat16)
        results = []
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            with testing.settings(split=True):
                results.append(linear(x, weight, bias, epilogue=epilogue, other=other))
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


def test_a_row_that_is_not_finite_leaves_the_others_alone() -> None:
    for index in range(len(CALLS)):
        x, weight, bias, other, epilogue = _arguments(index, torch.bfloat16)
        for level in LEVELS:
            with isa.use(level):
                clean = linear(x, weight, bias, epilogue=epilogue, other=other)
                broken = x.clone()
                broken[1, 3] = float("nan")
                result = linear(broken, weight, bias, epilogue=epilogue, other=other)
            assert result[1].isnan().all(), level
            kept = torch.arange(len(x)) != 1
            assert torch.equal(result[kept], clean[kept]), level


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("format", FORMATS)
def test_routed_mlp_is_the_sum_over_chosen_experts(format: str, tokens: int) -> None:
    torch.manual_seed(tokens)
    group = 32 if FORMATS[format].has_codes else None
    pairs = [[_weight(64, 96, format, group, False) for _ in "gu"] for _ in range(4)]
    down = [_weight(96, 64, format, group, False) for _ in range(4)]
    gate_up = [PanelWeight.gated(*pair) for pair in pairs]
    x = torch.randn(tokens, 96)
    weights, indices = torch.randn(tokens, 4).softmax(-1).topk(2)
    wanted = torch.zeros(tokens, 96, dtype=torch.float64)
    for token in range(tokens):
        for share, expert in zip(weights[token], indices[token], strict=True):
            gate, up = (weight.dense().double() for weight in pairs[int(expert)])
            value = x[token].double()
            inner = torch.nn.functional.silu(gate @ value) * (up @ value)
            wanted[token] += share * (down[int(expert)].dense().double() @ inner)
    found = routed_mlp(x, weights, indices, gate_up, down)
    again = routed_mlp(x, weights, indices, Experts.of(gate_up), Experts.of(down))
    assert torch.equal(found, again)
    # The dense values are rounded to bfloat16; the codes are not.
    tolerance = 0.02 if FORMATS[format].has_codes else 1e-5
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def test_routed_mlp_reads_only_chosen_experts() -> None:
    torch.manual_seed(0)
    gate_up = [PanelWeight.gated(*(_weight(32, 64, "bf16", None, True),) * 2) for _ in range(3)]
    down = [_weight(64, 32, "bf16", None, True) for _ in range(3)]
    x, weights = torch.randn(20, 64), torch.rand(20, 2)
    indices = torch.tensor([[0, 2]] * 20)
    before = routed_mlp(x, weights, indices, gate_up, down)
    for weight in (gate_up[1], down[1]):
        weight.packed.fill_(0xFF)
    assert torch.equal(routed_mlp(x, weights, indices, gate_up, down), before)


def test_experts_have_to_be_alike() -> None:
    one, other = _weight(32, 64, "bf16", None, True), _weight(32, 128, "bf16", None, True)
    with pytest.raises(ValueError, match=r"moe: expected shape .*32, 64.* got .*32, 128"):
        Experts.of([one, other])
    with pytest.raises(ValueError, match="moe: expected weights of at least one expert, got none"):
        Experts.of([])
