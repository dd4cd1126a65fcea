"""Products of bytes: exact sums wherever blocks, chunks and tiles end, and how they are rounded."""

from __future__ import annotations

import pytest
import torch
from harness import LEVELS

from marks import NEEDS_LIBRARY
from oxytorch import isa, ops, testing
from oxytorch.ops._quantized import pack_weight, padded, random_bytes
from oxytorch.ops.panels.epilogues import ACTIVATIONS, ADDED, is_gated
from oxytorch.ops.quantized_convolution import pack_convolution
from oxytorch.program.program import Program

pytestmark = NEEDS_LIBRARY

BYTES = {"int8": torch.int8, "uint8": torch.uint8}


def weight_of(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Panels, scales and sums of a random weight."""
    panels, sums = pack_weight(random_bytes(outputs, inputs, dtype=torch.int8))
    return panels, padded(torch.rand(outputs) / 100 + 0.001), sums


def linear(level: str, *args: object, **named: object) -> torch.Tensor:
    with isa.use(level):
        return ops.quantized_linear(*args, **named)  # type: ignore[arg-type]


def expected(*args: object, **named: object) -> torch.Tensor:
    return ops.registry()["quantized_linear"].reference(*args, **named)  # type: ignore[no-any-return]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("split", [False, True])
def test_sums_are_exact_where_blocks_end(level: str, kind: str, split: bool) -> None:
    torch.manual_seed(0)
    for rows in (1, 4, 5, 6, 7, 15, 16, 17, 31, 33, 48, 63, 97, 290):
        for outputs, inputs in ((15, 64), (16, 3), (33, 128), (64, 60), (70, 516), (130, 65)):
            x = random_bytes(rows, inputs, dtype=BYTES[kind])
            weight = weight_of(outputs, inputs)
            args = (x, 0.02, 7, *weight, outputs, torch.randn(outputs))
            with testing.settings(split=split):
                result = linear(level, *args)
            assert torch.equal(result, expected(*args)), (rows, outputs, inputs)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("byte", "zero_point"), [(255, 0), (255, 255), (0, 255), (128, 3)])
@pytest.mark.parametrize("number", [-128, 127, -1])
@pytest.mark.parametrize("rows", [1, 20])
def test_the_largest_sums_do_not_overflow(
    level: str, byte: int, zero_point: int, number: int, rows: int
) -> None:
    inputs = 65536
    x = torch.full((rows, inputs), byte, dtype=torch.uint8)
    panels, sums = pack_weight(torch.full((16, inputs), number, dtype=torch.int8))
    result = linear(level, x, 1.0, zero_point, panels, torch.ones(16), sums, 16)
    assert (result == (byte - zero_point) * number * inputs).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("out_dtype", BYTES)
@pytest.mark.parametrize("epilogue", [name for name in ACTIVATIONS if not is_gated(name)])
def test_bytes_are_the_nearest_of_every_epilogue(level: str, out_dtype: str, epilogue: str) -> None:
    torch.manual_seed(1)
    x, weight = random_bytes(37, 200, dtype=torch.uint8), weight_of(90, 200)
    other = torch.randn(37, 90) if epilogue in ADDED else None
    args = (x, 0.001, 128, *weight, 90, torch.randn(90), other, None, 0, epilogue)
    scale, middle = 0.03, 5
    exact = expected(*args).double() / scale + middle
    limits = torch.iinfo(BYTES[out_dtype])
    result = linear(level, *args, out_dtype, scale, middle)
    assert result.dtype == BYTES[out_dtype]
    # A step and as much as float32 errs.
    assert ((result - exact.clamp(limits.min, limits.max)).abs() <= 0.5 + 1e-3).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [3, 40])
def test_a_row_with_nan_or_infinity_spoils_no_other(level: str, rows: int) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(rows, 130), weight_of(40, 130)
    clean = linear(level, x, None, 0, *weight, 40)
    x[1, 5], x[2, 129] = float("nan"), float("-inf")
    result = linear(level, x, None, 0, *weight, 40)
    assert result[1:3].isnan().all()
    kept = [row for row in range(rows) if row not in (1, 2)]
    assert torch.equal(result[kept], clean[kept])
    as_bytes = linear(
        level, x, None, 0, *weight, 40, out_dtype="uint8", out_scale=0.1, out_zero_point=9
    )
    assert (as_bytes[1:3] == 0).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("other", ["float32", "int8", "uint8"])
def test_what_is_added_may_be_strided(level: str, other: str) -> None:
    torch.manual_seed(3)
    x, weight = random_bytes(2, 21, 64, dtype=torch.int8), weight_of(48, 64)
    if other == "float32":
        added: tuple[object, ...] = (torch.randn(2, 21, 100)[..., 5:53], None, 0)
    else:
        added = (random_bytes(2, 21, 100, dtype=BYTES[other])[..., 5:53], 0.5, 3)
    args = (x[:, ::2], 0.02, 0, *weight, 48, None)
    small = (added[0][:, ::2], *added[1:])  # type: ignore[index]
    result = linear(level, *args, *small, "add_relu", "uint8", 0.7, 2)
    assert torch.equal(result, expected(*args, *small, "add_relu", "uint8", 0.7, 2))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("side", [7, 14, 19])
@pytest.mark.parametrize("kind", BYTES)
def test_convolutions_are_exact_however_they_are_split(level: str, side: int, kind: str) -> None:
    torch.manual_seed(4)
    for images, channels, outputs, kernel, stride, groups in (
        (1, 64, 72, 3, 1, 1),
        (2, 12, 40, 3, 2, 4),
        (3, 3, 64, 7, 2, 1),
        (1, 130, 130, 1, 2, 1),
    ):
        x = random_bytes(images, side, side, channels, dtype=BYTES[kind]).movedim(-1, 1)
        weight = random_bytes(outputs, channels // groups, kernel, kernel, dtype=torch.int8)
        packed = pack_convolution(weight, torch.rand(outputs) / 100 + 0.001, groups)
        pads = [kernel // 2] * 4
        args = (x, 0.02, 7, *packed, [kernel] * 2, outputs, torch.randn(outputs), None)
        rest = ([stride] * 2, pads, [1, 1], groups, None, 0, "relu", "uint8", 0.5, 3)
        wanted = ops.registry()["quantized_convolution"].reference(*args, *rest)
        for split in (False, True):
            with isa.use(level), testing.settings(split=split):
                result = ops.quantized_convolution(*args, *rest)  # type: ignore[arg-type]
            assert torch.equal(result, wanted), (images, channels, outputs, kernel)


@pytest.mark.skipif(
    torch.__version__.startswith("2.10"), reason="torch 2.10 makes no tensors with a deleter"
)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", BYTES)
def test_weights_that_nobody_packed_are_multiplied_with_what_was_written(
    level: str, kind: str
) -> None:
    torch.manual_seed(7)
    for channels, outputs, kernel, groups in (
        (3, 16, 3, 1),
        (3, 16, 7, 1),
        (16, 40, 3, 1),
        (12, 24, 3, 4),
        (24, 24, 3, 24),
        (18, 20, 1, 1),
    ):
        x = random_bytes(2, channels, 13, 13, dtype=BYTES[kind])
        weight = random_bytes(outputs, channels // groups, kernel, kernel, dtype=torch.int8)
        panels, scales, sums = pack_convolution(weight, torch.rand(outputs), groups)
        panels = torch.randint_like(panels, 256)  # none of what is a zero where it was packed
        sizes = f"[ {kernel} {kernel} ] {outputs} none none [ 1 1 ] [ 1 1 1 1 ] [ 1 1 ] {groups}"
        program = Program(
            f"inputs 1 0 3\n%4 = oxytorch::quantized_convolution %0 0.5 3 %1 %2 %3 {sizes} none 0 "
            '"none" "float32" none 0\n%5 = aten::neg %4\noutputs %5',
            [panels, scales, sums],
        )
        with isa.use(level):
            with testing.arenas(used=False):
                wanted = program([x])[0][0]
            with testing.arenas(poisoned=True):
                assert torch.equal(program([x])[0][0], wanted), (channels, kernel, groups)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", BYTES)
def test_bytes_are_those_of_torch(level: str, dtype: str) -> None:
    torch.manual_seed(5)
    # A scale whose inverse is exact, as torch and we may round it at another time.
    x = torch.cat([torch.randn(1003) * 3, torch.arange(-200, 200) / 16 + 1 / 32])
    limits = torch.iinfo(BYTES[dtype])
    with isa.use(level):
        ours = ops.quantize_per_tensor(x, 1 / 16, 10, dtype)
        back = ops.dequantize_per_tensor(ours, 1 / 16, 10, "float32")
    fake = torch.fake_quantize_per_tensor_affine(x, 1 / 16, 10, limits.min, limits.max)
    assert torch.equal(back, fake)
    kind = torch.qint8 if dtype == "int8" else torch.quint8
    assert torch.equal(ours, torch.quantize_per_tensor(x, 1 / 16, 10, kind).int_repr())


def test_bytes_stay_bytes_in_a_program() -> None:
    torch.manual_seed(6)
    first, second = weight_of(96, 64), weight_of(32, 96)

    def model(x: torch.Tensor) -> torch.Tensor:
        given = torch.ops.oxytorch.quantize_per_tensor(x, 0.05, 128, "uint8")
        middle = torch.ops.oxytorch.quantized_linear(
            given, 0.05, 128, *first, 96, None, None, None, 0, "relu", "uint8", 0.3, 0
        )
        return torch.ops.oxytorch.quantized_linear(middle, 0.3, 0, *second, 32)

    x = torch.randn(20, 64)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="oxytorch")
        assert torch.equal(compiled(x), model(x))
        assert torch.equal(compiled(x + 1), model(x + 1))
