"""Convolution over a weight in panels: a product of the windows of images, of any geometry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from .._autocast import Autocast
from .._binding import with_kernel
from .._op import Cost, Sample, nbytes, register
from .._samples import shape_name, values
from ..panels import layout
from ..panels.epilogues import ADDED
from ..panels.formats import PLAIN, PLAIN_NAMES
from ..windows import channels_last, convolved, positions, result_count, sample_geometry


def matrix_of(weight: Tensor, groups: int = 1) -> Tensor:
    """The rows that `pack_panels` takes, of a weight [out_channels, in_channels / groups, *kernel].

    Returns [groups * rows, kernel positions * channels]: the outputs of each group, padded with
    zeros to a multiple of 16; of each output the positions, and of each position the channels,
    padded to an even number in bfloat16, whose panels hold pairs.
    """
    rows = F.pad(weight.movedim(1, -1), (0, _padding(weight.shape[1], weight.dtype)))
    rows = rows.reshape(groups, weight.shape[0] // groups, -1)
    return F.pad(rows, (0, 0, 0, -rows.shape[1] % layout.OUTPUTS)).flatten(0, 1)


def _padding(channels: int, dtype: torch.dtype) -> int:
    return channels % 2 if dtype == torch.bfloat16 else 0


@with_kernel
def convolution_panels(
    x: Tensor,
    format: str,
    panels: Tensor,
    kernel_size: Sequence[int],
    out_channels: int,
    bias: Tensor | None,
    other: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    epilogue: str = "none",
) -> Tensor:
    """Computes epilogue(convolution(x, weight) + bias) for a weight in panels.

    x: [images, in_channels, *spatial] with 1 to 3 spatial sizes, float32, bfloat16 or float16; a
        copy is made where its channels do not lie side by side (channels-last order).
    format: "fp32" or "bf16".
    panels: uint8, of the rows that `matrix_of` gives for a weight [out_channels, in_channels /
        groups, *kernel_size].
    bias: [out_channels], of x's dtype or float32.
    other: of the result's shape and x's dtype.
    stride, dilation: one number for each spatial size.
    padding: two, zeros before and after.
    groups: divide in_channels and out_channels.
    epilogue: as in `linear_panels`, not a gated one.

    Returns [images, out_channels, *sizes] in x's dtype, in channels-last order. Sums and epilogue
    are float32, rounded once; they do not depend on the number of threads. float64 and other
    devices run plain PyTorch.
    Raises RuntimeError if a shape, dtype, device or name does not fit.
    """
    channels = x.shape[1] // groups
    in_features = (channels + _padding(channels, PLAIN[format])) * prod(kernel_size)
    outputs = out_channels // groups
    rows = groups * (outputs + -outputs % layout.OUTPUTS)
    stored = layout.unpack(format, panels, rows, in_features)
    weight = stored.reshape(groups, -1, in_features)[:, :outputs]
    weight = weight.reshape(out_channels, *kernel_size, -1)[..., :channels].movedim(-1, 1)
    return convolved(x, weight, bias, other, (stride, padding, dilation), groups, epilogue)


# x, out_channels, kernel, stride, padding, dilation, groups, bias, epilogue
_CALLS: tuple[tuple[tuple[int, ...], int, tuple[int, ...], int, int, int, int, bool, str], ...] = (
    ((1, 3, 9, 8), 16, (3, 3), 1, 1, 1, 1, True, "none"),
    ((2, 8, 7, 7), 24, (1, 1), 1, 0, 1, 1, True, "relu6"),
    ((2, 8, 7, 6), 40, (1, 1), 2, 0, 1, 1, False, "relu"),
    ((1, 16, 12, 11), 17, (3, 3), 2, 1, 1, 1, True, "add"),
    ((1, 33, 6, 7), 8, (2, 4), 1, 2, 1, 1, True, "silu"),
    ((2, 8, 9, 9), 12, (3, 3), 1, 2, 2, 4, True, "add_relu"),
    ((2, 6, 17), 4, (5,), 2, 2, 1, 2, True, "none"),
    ((3, 20, 40), 20, (9,), 1, 4, 1, 1, False, "gelu"),
    ((1, 4, 5, 6, 7), 3, (3, 2, 3), 1, 1, 1, 1, True, "none"),
    ((1, 72, 5, 5), 80, (5, 5), 1, 2, 1, 1, True, "hardswish"),
    ((0, 8, 7, 7), 8, (3, 3), 1, 1, 1, 1, True, "none"),
    ((1, 16, 9, 7), 20, (3, 3), 1, 1, 1, 1, True, "silu_add"),
)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    if size != "test":
        images, channels, side = (1, 64, 28) if size == "cache" else (16, 64, 112)
        calls = (((images, channels, side, side), channels, (3, 3), 1, 1, 1, 1, True, "relu"),)
    else:
        calls = _CALLS  # type: ignore[assignment]
    for shape, out, kernel, stride, padding, dilation, groups, has_bias, epilogue in calls:
        # Gradients of small results can be compared by their absolute error.
        scale = 1 / 64 if epilogue in ADDED else 1.0
        x = channels_last(values(*shape, dtype=dtype) * scale)
        plain = values(out, shape[1] // groups, *kernel, dtype=torch.float32)
        stored = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        matrix = matrix_of((plain / plain[0].numel() ** 0.5).to(stored), groups)
        format = PLAIN_NAMES[stored]
        bias = values(out, dtype=dtype) * scale if has_bias else None
        geometry = sample_geometry(kernel, stride, padding, dilation)
        spatial = positions(shape, kernel, *geometry)
        other = None
        if epilogue in ADDED:
            other = channels_last(values(shape[0], out, *spatial, dtype=dtype) * scale)
        panels = layout.pack(format, matrix)
        rest = (list(kernel), out, bias, other, *geometry, groups, epilogue)
        yield Sample(f"{shape_name(shape)}-{epilogue}", (x, format, panels, *rest))


def cost(
    x: Tensor,
    kernel_size: Sequence[int],
    out_channels: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    **rest: object,
) -> Cost:
    """Reads x, panels, bias and other, writes the result."""
    outputs = result_count(x, out_channels, kernel_size, (stride, padding, dilation))
    in_features = x.shape[1] // groups * prod(kernel_size)
    return Cost(x.nbytes + nbytes(rest) + outputs * x.dtype.itemsize, 2 * outputs * in_features)


op = register(convolution_panels, samples, cost, autocast=Autocast("lower", ("x", "bias", "other")))
