"""Convolution of bytes over a weight of bytes, whose result may be bytes too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from .._binding import with_kernel
from .._op import Cost, Sample, nbytes, register
from .._quantized import NUMBERS, pack_weight, result_of, sample_numbers
from .._quantized import padded as padded_outputs
from .._samples import shape_name
from ..convolution_panels import matrix_of
from ..panels import layout
from ..panels.epilogues import ADDED
from ..windows import channels_last, padded, positions, result_count, sample_geometry

MOST_LINES = 64
"""Positions of a kernel for each channel by itself in all but the last size."""


def pack_convolution(
    weight: Tensor, scales: Tensor, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Panels, channel_scales and channel_sums of a convolution's weight, as the op takes them.

    weight: int8 [out_channels, in_channels / groups, *kernel].
    scales: float32 [out_channels].
    """
    if is_depthwise(weight.shape[0], weight.shape[1], groups):
        panels, sums = pack_weight(by_columns(weight))
        return panels, padded_outputs(scales), sums
    panels, sums = pack_weight(by_lines(weight, groups))
    rows = scales.reshape(groups, -1)
    return panels, F.pad(rows, (0, -rows.shape[1] % layout.OUTPUTS)).flatten(), sums


def is_depthwise(out_channels: int, channels: int, groups: int) -> bool:
    """Whether each channel is convolved separately. channels: of a group."""
    return groups > 1 and channels == 1 and out_channels == groups


def by_columns(weight: Tensor) -> Tensor:
    """[channels, columns * lines] of a depthwise weight [channels, 1, *lines, columns].

    Lines, which are all dimensions but the last, are padded with zeros to a multiple of 4.
    """
    columns = weight.flatten(1, -2).transpose(1, 2)
    return F.pad(columns, (0, -columns.shape[2] % 4)).flatten(1)


def by_lines(weight: Tensor, groups: int) -> Tensor:
    """[groups * rows, lines * columns * channels] of any other weight.

    The outputs of each group are padded with zeros to a multiple of 16, and the columns and
    channels of each line to a multiple of 4.
    """
    matrix = matrix_of(weight, groups)
    lines = matrix.reshape(matrix.shape[0], weight.shape[2:-1].numel(), -1)
    return F.pad(lines, (0, -lines.shape[2] % 4)).flatten(1)


@with_kernel
def quantized_convolution(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    panels: Tensor,
    channel_scales: Tensor,
    channel_sums: Tensor,
    kernel_size: Sequence[int],
    out_channels: int,
    bias: Tensor | None,
    other: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    other_scale: float | None = None,
    other_zero_point: int = 0,
    epilogue: str = "none",
    out_dtype: str = "float32",
    out_scale: float | None = None,
    out_zero_point: int = 0,
) -> Tensor:
    """Computes epilogue(convolution(x, weight) + bias) for a weight of signed bytes.

    x: [images, in_channels, *spatial] with 1 to 3 spatial sizes, int8 or uint8, of which a number
        is x_scale * (byte - x_zero_point); a copy is made where its channels do not lie side by
        side. panels, channel_scales and channel_sums: from `pack_convolution`; the positions of a
        kernel times the channels of a group are at most 65536. A kernel for each channel by itself
        has at most 64 positions in all but the last size.
    stride, dilation: one number for each spatial size.
    padding: two, zeros before and after; a zero is the byte x_zero_point.
    groups: divide in_channels and out_channels. bias, other, epilogue and the result's dtype, scale
        and zero point: as in `quantized_linear`, the result and `other` of shape [images,
        out_channels, *sizes].

    Returns the result in channels-last order, rounded as by `quantized_linear`. There is no
    gradient. Other devices run plain PyTorch.
    Raises RuntimeError if a shape, dtype, device, scale or name does not fit.
    """
    channels = x.shape[1] // groups
    weight, scales = _unpacked(panels, channel_scales, kernel_size, out_channels, channels, groups)
    none = [0] * len(stride)
    images = padded(x.double() - x_zero_point, padding)
    sums = torch.convolution(images, weight, None, stride, none, dilation, False, none, groups)
    other = None if other is None else other.movedim(1, -1)
    result = result_of(
        sums.round().movedim(1, -1), scales * x_scale, bias, other, other_scale, other_zero_point,
        epilogue, out_dtype, out_scale, out_zero_point,
    )  # fmt: skip
    return channels_last(result.movedim(-1, 1))


def _unpacked(
    panels: Tensor,
    channel_scales: Tensor,
    kernel_size: Sequence[int],
    out_channels: int,
    channels: int,
    groups: int,
) -> tuple[Tensor, Tensor]:
    """A weight float64 [out_channels, channels, *kernel_size] and its scales [out_channels]."""
    *lines, columns = kernel_size
    count = torch.Size(lines).numel()
    if is_depthwise(out_channels, channels, groups):
        features = columns * (count + -count % 4)
        stored = layout.unpack("int8", panels, out_channels, features).view(torch.int8)
        weight = stored.reshape(out_channels, columns, -1)[..., :count].transpose(1, 2)
        weight = weight.reshape(out_channels, 1, *kernel_size)
        return weight.double(), channel_scales[:out_channels]
    run, outputs = columns * channels, out_channels // groups
    rows, features = outputs + -outputs % layout.OUTPUTS, count * (run + -run % 4)
    stored = layout.unpack("int8", panels, groups * rows, features).view(torch.int8)
    weight = stored.reshape(groups, rows, count, -1)[:, :outputs, :, :run].double()
    weight = weight.reshape(out_channels, *kernel_size, channels).movedim(-1, 1)
    return weight, channel_scales.reshape(groups, rows)[:, :outputs].flatten()


# x, out_channels, kernel, stride, padding, dilation, groups, dtypes of x, other and out (None: the
# sample's), bias, epilogue
_Kinds = tuple[str, str | None, str | None]
_Call = tuple[tuple[int, ...], int, tuple[int, ...], int, int, int, int, _Kinds, bool, str]
_CALLS: tuple[_Call, ...] = (
    ((1, 3, 9, 8), 16, (3, 3), 1, 1, 1, 1, ("uint8", None, None), True, "none"),
    ((2, 8, 7, 7), 24, (1, 1), 1, 0, 1, 1, ("uint8", None, "uint8"), True, "relu6"),
    ((2, 8, 7, 6), 40, (1, 1), 2, 0, 1, 1, ("int8", None, "int8"), False, "relu"),
    ((1, 16, 12, 11), 17, (3, 3), 2, 1, 1, 1, ("uint8", "uint8", "uint8"), True, "add"),
    ((1, 33, 6, 7), 8, (2, 4), 1, 2, 1, 1, ("int8", None, None), True, "silu"),
    ((2, 8, 9, 9), 12, (3, 3), 1, 2, 2, 4, ("uint8", "int8", "int8"), True, "add_relu"),
    ((2, 6, 17), 4, (5,), 2, 2, 1, 2, ("int8", None, "uint8"), True, "none"),
    ((3, 20, 40), 20, (9,), 1, 4, 1, 1, ("uint8", None, None), False, "gelu"),
    ((1, 4, 5, 6, 7), 3, (3, 2, 3), 1, 1, 1, 1, ("uint8", None, "uint8"), True, "none"),
    ((1, 64, 15, 15), 80, (3, 3), 1, 1, 1, 1, ("uint8", "uint8", "uint8"), True, "add_relu"),
    ((1, 40, 5, 5), 96, (5, 5), 1, 2, 1, 1, ("int8", None, None), True, "hardswish"),
    ((1, 6, 7, 7), 6, (3, 3), 1, 1, 1, 6, ("uint8", None, "uint8"), True, "relu6"),
    ((1, 6, 7, 7), 12, (3, 3), 1, 1, 1, 6, ("uint8", None, "uint8"), True, "relu6"),
    ((2, 100, 9, 15), 100, (3, 3), 2, 1, 1, 100, ("int8", None, "int8"), True, "relu"),
    ((1, 184, 8, 14), 184, (5, 5), 1, 2, 1, 184, ("uint8", "uint8", "uint8"), True, "add_relu"),
    ((1, 48, 21, 40), 48, (7, 3), 1, 3, 2, 48, ("uint8", None, None), False, "silu"),
    ((2, 40, 31), 40, (9,), 1, 4, 1, 40, ("int8", None, "uint8"), True, "none"),
    ((1, 20, 5, 6, 7), 20, (3, 3, 3), 2, 1, 1, 20, ("uint8", "int8", "int8"), True, "add"),
    ((0, 8, 7, 7), 8, (3, 3), 1, 1, 1, 1, ("uint8", None, "uint8"), True, "none"),
    ((1, 32, 9, 8), 48, (3, 3), 1, 1, 1, 1, ("uint8", "uint8", "uint8"), True, "silu_add"),
    ((2, 24, 7, 7), 24, (3, 3), 1, 1, 1, 24, ("int8", None, "int8"), False, "gelu_add"),
)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    calls = _CALLS
    if size != "test":
        images, side = (1, 28) if size == "cache" else (16, 112)
        large: _Kinds = ("uint8", None, "uint8")
        calls = (((images, 64, side, side), 64, (3, 3), 1, 1, 1, 1, large, True, "relu"),)
    for shape, out, kernel, stride, padding, dilation, groups, kinds, has_bias, epilogue in calls:
        x = sample_numbers(shape, NUMBERS[kinds[0]])
        weight = torch.randint(
            -128, 128, (out, shape[1] // groups, *kernel), dtype=torch.int8, device="cpu"
        )
        scales = (torch.rand(out, device="cpu") + 0.1) / 64 / weight[0].numel() ** 0.5
        bias = torch.randn(out, device="cpu") if has_bias else None
        geometry = sample_geometry(kernel, stride, padding, dilation)
        added: tuple[Tensor | None, float | None, int] = None, None, 0
        if epilogue in ADDED:
            sizes = (shape[0], out, *positions(shape, kernel, *geometry))
            added = sample_numbers(sizes, NUMBERS[kinds[1]] if kinds[1] else dtype)
        name = kinds[2] or str(dtype).removeprefix("torch.")
        result = (name, 1 / 32, -7 if name == "int8" else 100) if kinds[2] else (name, None, 0)
        other = None if added[0] is None else channels_last(added[0])
        yield Sample(
            f"{shape_name(shape)}-{epilogue}-{kinds[0]}-{kinds[2] or 'floating'}",
            (
                channels_last(x[0]),
                *x[1:],
                *pack_convolution(weight, scales, groups),
                list(kernel),
                out,
                bias,
                other,
                *geometry,
                groups,
                *added[1:],
                epilogue,
                *result,
            ),
        )


def cost(
    x: Tensor,
    kernel_size: Sequence[int],
    out_channels: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    out_dtype: str,
    **rest: object,
) -> Cost:
    """Reads x and the weight's tensors, bias and other, writes the result."""
    outputs = result_count(x, out_channels, kernel_size, (stride, padding, dilation))
    products = x.shape[1] // groups * prod(kernel_size)
    moved = x.nbytes + nbytes(rest) + outputs * NUMBERS[out_dtype].itemsize
    return Cost(moved, 2 * outputs * products)


op = register(quantized_convolution, samples, cost, has_gradient=False)
