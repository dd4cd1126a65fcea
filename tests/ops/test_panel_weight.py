"""Weights in panels: exact round trips, the stored form, views of parts, and wrong input."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from oxytorch.ops.linear_panels import linear
from oxytorch.ops.panels import PanelWeight, layout
from oxytorch.ops.panels.formats import CODES, FORMATS, WeightFormat
from oxytorch.ops.quantize_weight import quantize_weight

SHAPES = [(1, 64), (16, 64), (33, 96), (40, 256), (7, 1037)]


def random_codes(
    format: str, out: int, inputs: int, groups: int = 1, asymmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    most = FORMATS[format].largest_code + 1
    codes = torch.randint(most, (out, inputs), dtype=torch.uint8)
    if FORMATS[format].floats is not None:
        codes[codes & 0x7F == 0x7F] = 0  # NaN has tests of its own
    scales = (torch.rand(out, groups) + 0.01).half().float()
    zero_points = torch.randint(most, (out, groups), dtype=torch.uint8) if asymmetric else None
    return codes, scales, zero_points


@pytest.mark.parametrize("shape", SHAPES)
def test_dense_weight_comes_back_bit_for_bit(shape: tuple[int, int]) -> None:
    values = torch.randn(shape).bfloat16()
    weight = PanelWeight.from_dense(values)
    assert torch.equal(weight.dense(), values)
    assert (weight.shape, weight.dtype, weight.format) == (values.shape, torch.bfloat16, "bf16")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", CODES)
@pytest.mark.parametrize("asymmetric", [False, True])
def test_codes_come_back(format: str, shape: tuple[int, int], asymmetric: bool) -> None:
    groups = shape[1] // 32 if shape[1] % 32 == 0 else 1
    given = random_codes(format, *shape, groups, asymmetric and FORMATS[format].middle is not None)
    weight = PanelWeight.from_codes(format, *given)
    for found, wanted in zip(weight.codes(), given, strict=True):
        assert (found is None and wanted is None) or torch.equal(found, wanted)


def test_layout_is_the_documented_one() -> None:
    codes = torch.arange(16 * 64).view(16, 64).remainder(16).to(torch.uint8)
    rows = layout.pack("int4", codes).view(8, 16, 4)
    for output, k in [(0, 0), (3, 5), (15, 63), (7, 38)]:
        row, rest = divmod(k, 8)
        half, j = divmod(rest, 4)
        assert rows[row, output, j] >> (4 * half) & 15 == codes[output, k]
    values = torch.randn(16, 64).bfloat16()
    pairs = layout.pack("bf16", values).view(torch.bfloat16).view(32, 16, 2)
    assert torch.equal(pairs[5, 9], values[9, 10:12])


def test_dense_values_are_scale_times_distance_from_zero_point() -> None:
    codes, scales, zero_points = random_codes("int4", 3, 64, 2, True)
    assert zero_points is not None
    weight = PanelWeight.from_codes("int4", codes, scales, zero_points, dtype=torch.float32)
    wanted = (codes.float() - zero_points.repeat_interleave(32, 1)) * scales.repeat_interleave(
        32, 1
    )
    assert torch.equal(weight.dense(), wanted)
    normal = PanelWeight.from_codes("nf4", codes, scales, dtype=torch.float32)
    table = FORMATS["nf4"].values()
    assert torch.equal(normal.dense(), table[codes.long()] * scales.repeat_interleave(32, 1))


def _equal(one: PanelWeight, other: PanelWeight) -> bool:
    left, right = one.tensors(), other.tensors()
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def test_codes_beyond_a_short_table_have_its_last_value() -> None:
    short = WeightFormat("short", 4, table=(-2.0, -1.0, 0.0, 1.0, 3.0))
    assert short.values().tolist() == [-2.0, -1.0, 0.0, 1.0] + [3.0] * 12
    units = torch.tensor([-9.0, -1.4, 0.2, 2.1, 3.0, 9.0])
    assert short.values()[short.nearest(units)].tolist() == [-2.0, -1.0, 0.0, 3.0, 3.0, 3.0]


@pytest.mark.parametrize("sizes", [(32, 16, 16), (33, 16, 5)])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_joined_weights_lie_one_below_the_other(sizes: tuple[int, ...], asymmetric: bool) -> None:
    parts = [
        PanelWeight.from_codes("int4", *random_codes("int4", n, 64, 2, asymmetric)) for n in sizes
    ]
    whole = PanelWeight.joined(parts)
    assert torch.equal(whole.dense(), torch.cat([part.dense() for part in parts]))
    dense = [PanelWeight.from_dense(torch.randn(n, 70)) for n in sizes]
    assert torch.equal(
        PanelWeight.joined(dense).dense(), torch.cat([part.dense() for part in dense])
    )


@pytest.mark.parametrize("width", [16, 33])
def test_gated_weight_alternates_and_gives_its_halves_back(width: int) -> None:
    gate, up = (
        PanelWeight.from_codes("int8", *random_codes("int8", width, 64, 2, True)) for _ in range(2)
    )
    both = PanelWeight.gated(gate, up)
    assert torch.equal(both.dense(), torch.cat([gate.dense(), up.dense()]))
    assert _equal(both.part(0, width), gate) and _equal(both.part(width, 2 * width), up)
    assert torch.equal(both.packed[1], up.packed[0])


def test_writing_a_part_writes_the_whole() -> None:
    whole = PanelWeight.joined([PanelWeight.from_dense(torch.randn(n, 64)) for n in (32, 20)])
    part = whole.part(32, 52)
    part.copy_(torch.ones(20, 64))
    assert torch.equal(whole.dense()[32:], torch.ones(20, 64).bfloat16())
    gated = PanelWeight.gated(*(PanelWeight.from_dense(torch.randn(20, 64)) for _ in range(2)))
    gated.part(20, 40).zero_()
    assert not gated.dense()[20:].any() and gated.dense()[:20].any()


@pytest.mark.parametrize("format", ["bf16", *CODES])
def test_stored_tensors_make_the_weight_again_without_a_copy(format: str) -> None:
    if format == "bf16":
        weight = PanelWeight.from_dense(torch.randn(33, 64))
    else:
        weight = PanelWeight.from_codes(format, *random_codes(format, 33, 64, 2))
    tensors = weight.tensors()
    again = PanelWeight.from_tensors(
        tensors, format=format, shape=(33, 64), group_size=weight.group_size, dtype=weight.dtype
    )
    assert torch.equal(again.dense(), weight.dense())
    for name, tensor in again.tensors().items():
        assert tensor.data_ptr() == tensors[name].data_ptr(), name
    assert weight.nbytes_packed() == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("format", CODES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_writing_its_own_values_changes_nothing(format: str, symmetric: bool) -> None:
    symmetric = symmetric or FORMATS[format].middle is None
    values = torch.randn(33, 128)
    given = quantize_weight(values, format, 32, symmetric, False)
    weight = PanelWeight.from_codes(format, *given)
    before = {name: tensor.clone() for name, tensor in weight.tensors().items()}
    weight.copy_(weight.dense())
    for name, tensor in weight.tensors().items():
        assert torch.equal(tensor, before[name]), name
    weight.copy_(2.5 * values)
    written = (2.5 * values).to(weight.dtype)
    wanted = quantize_weight(written, format, 32, symmetric)
    assert torch.equal(weight.dense(), PanelWeight.from_codes(format, *wanted).dense())


@pytest.mark.parametrize("format", CODES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_nearest_codes_are_within_half_a_step(format: str, symmetric: bool) -> None:
    symmetric = symmetric or FORMATS[format].middle is None
    values = torch.randn(20, 256) * torch.logspace(-6, 3, 20)[:, None]
    values[3], values[4, :64] = 0, 0
    codes, scales, zero_points = quantize_weight(values, format, 64, symmetric, False)
    weight = PanelWeight.from_codes(format, codes, scales, zero_points, dtype=torch.float32)
    step = scales.repeat_interleave(64, 1)
    reach = 0.51 if symmetric else 1.01  # where there is a zero point, it is rounded too
    if FORMATS[format].middle is None:
        table = FORMATS[format].values()
        reach = float(table[table.isfinite()].sort().values.diff().max()) / 2 + 0.01
    assert ((weight.dense() - values).abs() <= reach * step).all()
    assert not weight.dense()[3].any() and not weight.dense()[4, :64].any()


def test_copies_and_pickles_keep_codes_and_settings() -> None:
    weight = PanelWeight.from_codes("int4", *random_codes("int4", 33, 64, 2, True))
    weight.activation_dtype = "int8"
    parameter = torch.nn.Parameter(weight, requires_grad=False)
    for again in (
        copy.deepcopy(parameter),
        pickle.loads(pickle.dumps(parameter)),
        parameter.detach(),
        parameter.clone(),
    ):
        assert _equal(again, weight)
        assert (again.activation_dtype, again.group_size) == ("int8", 32)
    assert isinstance(copy.deepcopy(parameter), torch.nn.Parameter)
    assert copy.deepcopy(parameter).packed.data_ptr() != weight.packed.data_ptr()


def test_plain_operations_see_plain_values() -> None:
    weight = PanelWeight.from_dense(torch.randn(8, 64))
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(F.linear(x, weight), F.linear(x, weight.dense()))
    assert torch.equal(weight + 1, weight.dense() + 1)


@pytest.mark.parametrize("epilogue", ["none", "add", "gelu", "gelu_tanh", "silu", "relu"])
def test_linear_is_the_formula(epilogue: str) -> None:
    weight = PanelWeight.from_codes("int8", *random_codes("int8", 33, 64, 2), dtype=torch.float32)
    x, bias, other = torch.randn(2, 3, 64), torch.randn(33), torch.randn(2, 3, 33)
    after = {
        "none": lambda v: v,
        "add": lambda v: v + other,
        "gelu": F.gelu,
        "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
        "silu": F.silu,
        "relu": F.relu,
    }[epilogue]
    wanted = after(F.linear(x, weight.dense(), bias))
    found = linear(x, weight, bias, epilogue=epilogue, other=other if epilogue == "add" else None)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-3)


def codes_of(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def _of_panels(count: int, format: str, dtype: torch.dtype) -> PanelWeight:
    """A weight [16, 64] whose panels have so many bytes, and nothing else."""
    return PanelWeight.from_tensors(
        {"panels": codes_of(count)}, format=format, shape=(16, 64), group_size=None, dtype=dtype
    )


CASES: list[tuple[str, Callable[[], object]]] = [
    (
        "expected group_size in [32, 64, 128, 256] or None, got 16",
        lambda: PanelWeight.from_codes("int4", codes_of(4, 64), torch.ones(4, 4)),
    ),
    (
        "expected scales with groups that divide in_features 64, got 3",
        lambda: PanelWeight.from_codes("int4", codes_of(4, 64), torch.ones(4, 3)),
    ),
    (
        "expected scales of shape [4, groups], got [5, 1]",
        lambda: PanelWeight.from_codes("int4", codes_of(4, 64), torch.ones(5, 1)),
    ),
    (
        "expected scales that are finite, got infinity or NaN",
        lambda: PanelWeight.from_codes("int4", codes_of(4, 64), torch.full((4, 1), torch.inf)),
    ),
    (
        "expected codes from 0 to 15, got 16",
        lambda: PanelWeight.from_codes("nf4", codes_of(4, 64) + 16, torch.ones(4, 1)),
    ),
    (
        "expected format in ['bf16', 'int8', 'int4', 'nf4', 'fp8', 'fp32'], got 'int3'",
        lambda: PanelWeight.from_codes("int3", codes_of(4, 64), torch.ones(4, 1)),
    ),
    (
        "expected zero_points None for nf4, got [4, 1]",
        lambda: PanelWeight.from_codes("nf4", codes_of(4, 64), torch.ones(4, 1), codes_of(4, 1)),
    ),
    (
        "expected weight of shape [out_features, in_features], got [3]",
        lambda: PanelWeight.from_dense(torch.ones(3)),
    ),
    (
        "gated: expected up of shape [16, 64], got [32, 64]",
        lambda: PanelWeight.gated(*(PanelWeight.from_dense(torch.ones(n, 64)) for n in (16, 32))),
    ),
    (
        "joined: expected 64 in_features in every weight, got 65",
        lambda: PanelWeight.joined([PanelWeight.from_dense(torch.ones(16, n)) for n in (64, 65)]),
    ),
    (
        "part: expected outputs in [0, 40) that begin and end at a multiple of 16, got 8 to 24",
        lambda: PanelWeight.from_dense(torch.ones(40, 64)).part(8, 24),
    ),
    (
        "expected tensors ['channel_scales', 'panels'], got ['panels']",
        lambda: _of_panels(512, "int4", torch.float32),
    ),
    (
        "expected panels torch.uint8 [2048], got torch.uint8 [2047]",
        lambda: _of_panels(2047, "bf16", torch.bfloat16),
    ),
]


@pytest.mark.parametrize(("message", "call"), CASES, ids=[message[:60] for message, _ in CASES])
def test_wrong_input_is_named(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize("format", CODES)
@pytest.mark.parametrize("group_size", [32, 128, 256])
def test_products_err_as_the_step_of_their_format_says(format: str, group_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(64, 1024, generator=generator) for _ in range(2))
    codes, scales, zero_points = quantize_weight(weight, format, group_size)
    rounded = PanelWeight.from_codes(format, codes, scales, zero_points).restore().float()
    error = ((x @ rounded.T - x @ weight.T).norm() / (x @ weight.T).norm()).item()
    assert 0.8 < error / FORMATS[format].rounding_error(group_size) < 1.15
