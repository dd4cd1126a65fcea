"""Convolutions of our own: where lines, chunks, ranges of panels and phases of strides end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import LEVELS
from torch import Tensor

from marks import NEEDS_LIBRARY
from oxytorch import isa, testing
from oxytorch.ops.convolution_panels import convolution_panels, matrix_of
from oxytorch.ops.depthwise_convolution import depthwise_convolution
from oxytorch.ops.panels import layout
from oxytorch.ops.panels.formats import PLAIN_NAMES

pytestmark = NEEDS_LIBRARY

# x, out_channels, kernel, stride, padding, dilation, groups
CALLS: tuple[tuple[tuple[int, ...], int, Any, Any, Any, Any, int], ...] = (
    ((1, 32, 56, 56), 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    ((2, 64, 28, 28), 40, (3, 3), (2, 2), (0, 1, 0, 1), (1, 1), 1),
    ((3, 48, 14, 14), 130, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    ((1, 16, 30, 31), 33, (5, 3), (2, 3), (2, 1, 0, 2), (1, 1), 1),
    ((1, 32, 20, 21), 16, (3, 3), (1, 2), (3, 3, 2, 2), (3, 2), 1),
    ((1, 96, 17, 19), 64, (2, 2), (3, 3), (0, 0, 0, 0), (2, 2), 1),
    ((2, 64, 9, 9), 96, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 2),
    ((1, 3, 50, 61), 64, (7, 7), (2, 2), (3, 3, 3, 3), (1, 1), 1),
    ((1, 3, 61, 70), 32, (3, 3), (2, 2), (0, 1, 0, 1), (1, 1), 1),
    ((2, 3, 24, 30), 80, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1), 1),
    ((1, 1, 28, 29), 20, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1), 1),
    ((1, 4, 21, 40), 33, (3, 3), (1, 2), (2, 2, 2, 2), (2, 2), 1),
    ((1, 3, 7, 13, 14), 24, (3, 3, 3), (1, 2, 2), (1, 1, 1, 1, 1, 1), (1, 1, 1), 1),
    ((2, 24, 18, 18), 48, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    ((2, 40, 33, 20), 70, (1, 1), (2, 1), (0, 0, 0, 0), (1, 1), 1),
    ((1, 72, 40, 40), 24, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    ((2, 64, 15, 14), 48, (1, 1), (2, 2), (0, 0, 0, 0), (1, 1), 1),
    ((1, 3, 15, 16), 16, (1, 1), (2, 3), (0, 0, 0, 0), (1, 1), 1),
    ((1, 32, 5, 8, 9), 32, (1, 1, 1), (2, 2, 2), (0, 0, 0, 0, 0, 0), (1, 1, 1), 2),
    ((1, 24, 9, 9), 16, (1, 3), (2, 2), (0, 0, 1, 1), (1, 1), 1),
    ((1, 16, 20, 20), 96, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    ((2, 24, 9, 9), 40, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    ((1, 136, 12, 12), 16, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    ((1, 2, 33, 70), 16, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    ((2, 4, 20, 45), 48, (4, 4), (4, 4), (0, 0, 0, 0), (1, 1), 1),
    ((1, 16, 1000), 32, (5,), (2,), (2, 2), (1,), 1),
    ((2, 32, 700), 17, (3,), (1,), (4, 4), (4,), 1),
    ((1, 16, 6, 15, 16), 20, (3, 3, 3), (2, 1, 2), (1, 1, 0, 2, 1, 1), (1, 2, 1), 1),
    ((1, 128, 7, 7), 512, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
)
DEPTHWISE: tuple[tuple[tuple[int, ...], Any, Any, Any, Any], ...] = (
    ((2, 80, 30, 31), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    ((1, 33, 28, 29), (3, 3), (2, 2), (0, 1, 0, 1), (1, 1)),
    ((1, 16, 5, 2), (7, 7), (1, 1), (3, 3, 3, 3), (1, 1)),
    ((1, 65, 19, 18), (5, 5), (2, 2), (2, 2, 1, 2), (1, 1)),
    ((2, 96, 7, 7), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    ((1, 80, 14, 14), (3, 3), (2, 2), (0, 1, 0, 1), (1, 1)),
    ((1, 64, 15, 16), (5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),
    ((2, 48, 17, 17), (5, 5), (2, 2), (1, 2, 1, 2), (1, 1)),
    ((1, 32, 9, 9), (3, 3), (1, 1), (0, 0, 0, 0), (1, 1)),
    ((1, 48, 13, 15), (7, 7), (1, 1), (3, 3, 3, 3), (1, 1)),
    ((2, 40, 7, 7), (7, 7), (1, 1), (3, 3, 3, 3), (1, 1)),
    ((1, 16, 17, 16), (7, 7), (2, 2), (3, 2, 3, 3), (1, 1)),
    ((1, 20, 14, 40), (4, 3), (1, 1), (0, 3, 5, 0), (2, 3)),
    ((1, 24, 300), (31,), (1,), (15, 15), (1,)),
    ((1, 17, 5, 6, 11), (3, 3, 3), (1, 2, 1), (1, 1, 1, 1, 1, 1), (1, 1, 1)),
)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
NAMES = {id(c): "x".join(map(str, c[0])) for c in (*CALLS, *DEPTHWISE)}


def _plain(
    x: Tensor, weight: Tensor, bias: Tensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    pairs = [*zip(padding[::2], padding[1::2], strict=True)][::-1]
    x = torch.nn.functional.pad(x, [size for pair in pairs for size in pair])
    none = [0] * len(stride)
    return torch.convolution(x, weight, bias, stride, none, dilation, False, none, groups)


def _numbers(call: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shape, out, kernel, *_, groups = call
    stored = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    weight = torch.randn(out, shape[1] // groups, *kernel)
    weight = (weight / weight[0].numel() ** 0.5).to(stored)
    return torch.randn(shape).to(dtype), weight, torch.randn(out)


def _own(call: Any, x: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Tensor:
    _, out, kernel, stride, padding, dilation, groups = call
    format = PLAIN_NAMES[weight.dtype]
    panels = layout.pack(format, matrix_of(weight, groups))
    return convolution_panels(
        x, format, panels, kernel, out, bias, None, stride, padding, dilation, groups, **options
    )


def _depthwise(call: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    _, _, stride, padding, dilation = call
    return depthwise_convolution(x, weight, bias, None, stride, padding, dilation)


def _depthwise_numbers(call: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shape, kernel, *_ = call
    weight = torch.randn(*kernel, shape[1])
    return (
        torch.randn(shape).to(dtype),
        weight / weight[..., 0].numel() ** 0.5,
        torch.randn(shape[1]),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: NAMES[id(call)])
def test_convolutions_agree_with_torch_at_every_level(call: Any, dtype: str) -> None:
    x, weight, bias = _numbers(call, DTYPES[dtype])
    exact = _plain(x.double(), weight.double(), bias.double(), *call[3:])
    plain = _plain(x.float(), weight.float(), bias, *call[3:]).to(x.dtype)
    for level in LEVELS:
        with testing.settings(split=True), isa.use(level):
            result = _own(call, x, weight, bias)
        assert result.shape == exact.shape
        testing.assert_close(result, exact, plain, f"{NAMES[id(call)]} at {level}")


def _agree_at_every_level(call: Any, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    kernels = weight.movedim(-1, 0).unsqueeze(1)
    rest = *call[2:], x.shape[1]
    exact = _plain(x.double(), kernels.double(), bias.double(), *rest)
    plain = _plain(x.float(), kernels, bias, *rest).to(x.dtype)
    for level in LEVELS:
        with testing.settings(split=True), isa.use(level):
            result = _depthwise(call, x, weight, bias)
        testing.assert_close(result, exact, plain, f"{NAMES[id(call)]} at {level}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", DEPTHWISE, ids=lambda call: NAMES[id(call)])
def test_convolutions_of_channels_agree_with_torch_at_every_level(call: Any, dtype: str) -> None:
    x, weight, bias = _depthwise_numbers(call, DTYPES[dtype])
    _agree_at_every_level(call, x, weight, bias)


@pytest.mark.parametrize("call", DEPTHWISE, ids=lambda call: NAMES[id(call)])
def test_convolutions_of_channels_by_weights_of_bfloat16_agree_with_torch(call: Any) -> None:
    x, weight, bias = _depthwise_numbers(call, torch.bfloat16)
    weight = weight.bfloat16().float()
    _agree_at_every_level(call, x, weight, bias)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", DEPTHWISE, ids=lambda call: NAMES[id(call)])
def test_a_number_reaches_the_results_of_its_own_windows_alone(
    call: Any, dtype: str, value: float
) -> None:
    x, weight, bias = _depthwise_numbers(call, DTYPES[dtype])
    weight = weight.bfloat16().float()
    x.flatten(2)[:, ::3, x[0, 0].numel() // 2] = value
    kernels = weight.movedim(-1, 0).unsqueeze(1)
    wanted = _plain(x.double(), kernels.double(), bias.double(), *call[2:], x.shape[1])
    for level in LEVELS:
        with isa.use(level):
            result = _depthwise(call, x, weight, bias)
        assert torch.equal(result.isfinite(), wanted.isfinite()), level


def test_infinite_weights_of_channels_do_not_meet_what_is_outside_of_images() -> None:
    weight = torch.ones(3, 3, 32)
    weight[0, :, 3] = float("inf")
    x = torch.ones(1, 32, 9, 9, dtype=torch.bfloat16)
    for level in LEVELS:
        with isa.use(level):
            result = depthwise_convolution(x, weight, None, None, [1, 1], [1] * 4, [1, 1])
        assert not result.isnan().any(), level


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_the_number_of_threads(dtype: str) -> None:
    threads = torch.get_num_threads()
    try:
        for call in CALLS:
            numbers = _numbers(call, DTYPES[dtype])
            for level in LEVELS:
                results = []
                for count in (1, 2, 7):
                    torch.set_num_threads(count)
                    with testing.settings(split=True), isa.use(level):
                        results.append(_own(call, *numbers))
                assert torch.equal(results[0], results[1]), (call, level)
                assert torch.equal(results[0], results[2]), (call, level)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_in_their_windows(dtype: str) -> None:
    """Windows lie side by side, and tiles reach beyond them: what they do not cover does not
    count."""
    for call in CALLS:
        x, weight, bias = _numbers(call, DTYPES[dtype])
        for value in (float("nan"), float("inf")):
            broken = x.clone()
            broken[-1, -1, ..., 3] = value
            hit = _plain(
                (broken != x).float(), torch.ones_like(weight).float(), bias * 0, *call[3:]
            )
            for level in LEVELS:
                with isa.use(level):
                    clean, result = _own(call, x, weight, bias), _own(call, broken, weight, bias)
                assert torch.equal(result[hit == 0], clean[hit == 0]), (call, level)
                assert not result[hit > 0].isfinite().any(), (call, level)


def test_activations_keep_nan() -> None:
    call = CALLS[0]
    x, weight, bias = _numbers(call, torch.float32)
    x[0, 0, 0, 0] = float("nan")
    for epilogue in ("relu", "relu6", "hardswish", "silu"):
        assert _own(call, x, weight, bias, epilogue=epilogue)[0, :, 0, 0].isnan().all()


def test_images_may_lie_in_any_order() -> None:
    for call in CALLS:
        x, weight, bias = _numbers(call, torch.float32)
        wanted = _own(call, x, weight, bias)
        last = x.movedim(1, -1).contiguous().movedim(-1, 1)
        for given in (last, x.flip(0).flip(0), torch.stack([last, last], -1)[..., 0]):
            assert torch.equal(_own(call, given, weight, bias), wanted)
        wide = x.new_zeros(*x.shape[:1], x.shape[1] + 5, *x.shape[2:])
        part = wide.movedim(1, -1).contiguous().movedim(-1, 1)[:, 2 : 2 + x.shape[1]]
        part.copy_(x)
        assert torch.equal(_own(call, part, weight, bias), wanted)
