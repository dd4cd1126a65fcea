"""Convolution of each channel separately."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from .._autocast import Autocast
from .._binding import with_kernel
from .._op import Cost, Sample, nbytes, register
from .._samples import shape_name, values
from ..panels.epilogues import ADDED
from ..windows import channels_last, convolved, positions, result_count, sample_geometry


@with_kernel
def depthwise_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    epilogue: str = "none",
) -> Tensor:
    """Computes epilogue(convolution(x, weight) + bias) with a kernel for each channel.

    x: [images, channels, *spatial] with 1 to 3 spatial sizes, float32, bfloat16 or float16; a copy
        is made where its channels do not lie side by side (channels-last order).
    weight: float32 [*kernel_size, channels], contiguous; at most 64 positions in all but the last
        size.
    bias: [channels], of x's dtype or float32.
    other: of the result's shape and x's dtype.
    stride, dilation: one number for each spatial size.
    padding: two, zeros before and after.
    epilogue: as in `linear_panels`, not a gated one.

    Returns [images, channels, *sizes] in x's dtype, in channels-last order. Sums and epilogue are
    float32, rounded once; they do not depend on the number of threads. float64 and other devices
    run plain PyTorch.
    Raises RuntimeError if a shape, dtype, device or name does not fit.
    """
    kernels = weight.movedim(-1, 0).unsqueeze(1)
    channels = x.shape[1]
    return convolved(x, kernels, bias, other, (stride, padding, dilation), channels, epilogue)


# x, kernel, stride, padding, dilation, bias, epilogue
_CALLS: tuple[tuple[tuple[int, ...], tuple[int, ...], int, int, int, bool, str], ...] = (
    ((1, 3, 9, 8), (3, 3), 1, 1, 1, True, "none"),
    ((2, 16, 7, 7), (3, 3), 2, 1, 1, True, "relu6"),
    ((1, 40, 9, 12), (5, 5), 1, 2, 1, False, "silu"),
    ((1, 33, 12, 11), (7, 7), 1, 3, 1, True, "add"),
    ((2, 17, 6, 13), (3, 3), 1, 2, 2, True, "add_relu"),
    ((1, 64, 11, 9), (5, 5), 2, 2, 1, True, "hardswish"),
    ((2, 24, 31), (9,), 1, 4, 1, True, "none"),
    ((1, 20, 5, 6, 7), (3, 3, 3), 1, 1, 1, False, "relu"),
    ((1, 8, 4, 40), (2, 4), 3, 0, 1, True, "gelu"),
    ((0, 8, 7, 7), (3, 3), 1, 1, 1, True, "none"),
    ((1, 24, 9, 7), (3, 3), 1, 1, 1, True, "relu_add"),
)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    if size != "test":
        images, channels, side = (1, 96, 56) if size == "cache" else (16, 256, 112)
        calls = (((images, channels, side, side), (3, 3), 1, 1, 1, True, "relu6"),)
    else:
        calls = _CALLS  # type: ignore[assignment]
    for shape, kernel, stride, padding, dilation, has_bias, epilogue in calls:
        scale = 1 / 64 if epilogue in ADDED else 1.0
        x = channels_last(values(*shape, dtype=dtype) * scale)
        weight = values(*kernel, shape[1], dtype=torch.float32) / prod(kernel) ** 0.5
        bias = values(shape[1], dtype=dtype) * scale if has_bias else None
        geometry = sample_geometry(kernel, stride, padding, dilation)
        spatial = positions(shape, kernel, *geometry)
        other = None
        if epilogue in ADDED:
            other = channels_last(values(shape[0], shape[1], *spatial, dtype=dtype) * scale)
        yield Sample(
            f"{shape_name(shape)}-{epilogue}", (x, weight, bias, other, *geometry, epilogue)
        )


def cost(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    **rest: object,
) -> Cost:
    """Reads x, weight, bias and other, writes the result."""
    kernel_size = weight.shape[:-1]
    outputs = result_count(x, x.shape[1], kernel_size, (stride, padding, dilation))
    moved = x.nbytes + nbytes((weight, rest)) + outputs * x.dtype.itemsize
    return Cost(moved, 2 * outputs * prod(kernel_size))


op = register(
    depthwise_convolution, samples, cost, autocast=Autocast("lower", ("x", "bias", "other"))
)
