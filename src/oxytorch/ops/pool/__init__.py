"""Pooling: the largest value, or the mean, of each window of images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .._binding import with_kernel
from .._op import Cost, Sample, register
from .._samples import shape_name, values
from ..windows import channels_last, padded, positions

KINDS = ("max", "mean")
_LARGEST = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


@with_kernel
def pool(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    kind: str,
) -> Tensor:
    """Returns the largest value or the mean of each window, for each channel separately.

    x: [images, channels, *spatial] with 1 to 3 spatial sizes, float32, bfloat16 or float16, for
        "max" int8 or uint8 too; a copy is made where its channels do not lie side by side
        (channels-last order).
    kernel_size, stride, dilation: one number for each spatial size.
    padding: two, what is added before and after: of "max" the least value, of "mean" zeros, which
        count.
    kind: "max", where NaN is the largest value, or "mean", without dilation.

    Returns [images, channels, *sizes] in x's dtype, in channels-last order. Sums are float32,
    rounded once; they do not depend on the number of threads. float64 and other devices run plain
    PyTorch.
    Raises RuntimeError if a shape, dtype, device or name does not fit.
    """
    if kind not in KINDS:
        raise RuntimeError(f"pool: expected kind 'max' or 'mean', got '{kind}'")
    if kind == "max":
        wide = _padded_by(*_floating(x, padding))
        result = _LARGEST[len(stride)](wide, [*kernel_size], [*stride], 0, [*dilation])
        return _in_order(result.to(x.dtype))
    if any(step != 1 for step in dilation):
        raise RuntimeError(f"pool: expected dilation of ones for 'mean', got {[*dilation]}")
    result = padded(x.to(torch.promote_types(x.dtype, torch.float32)), padding)
    for dim, (size, step) in enumerate(zip(kernel_size, stride, strict=True), 2):
        result = result.unfold(dim, size, step).mean(-1)
    return _in_order(result.to(x.dtype))


def _in_order(result: Tensor) -> Tensor:
    """With channels side by side; of one position in torch's order, which is the same."""
    if result.shape[2:].numel() == 1:
        return result.clone(memory_format=torch.contiguous_format)
    return channels_last(result)


def _floating(x: Tensor, padding: Sequence[int]) -> tuple[Tensor, Sequence[int], float]:
    """x in a floating dtype, its padding, and the least value of its own dtype."""
    if x.is_floating_point():
        return x, padding, float("-inf")
    return x.float(), padding, torch.iinfo(x.dtype).min


def _padded_by(x: Tensor, padding: Sequence[int], value: float) -> Tensor:
    pairs = [*zip(padding[::2], padding[1::2], strict=True)][::-1]
    return F.pad(x, [size for pair in pairs for size in pair], value=value)


# x, kernel, stride, padding, dilation, kind
_CALLS: tuple[tuple[tuple[int, ...], tuple[int, ...], int, int, int, str], ...] = (
    ((1, 3, 9, 8), (3, 3), 2, 1, 1, "max"),
    ((2, 16, 7, 7), (2, 2), 2, 0, 1, "mean"),
    ((1, 40, 9, 12), (9, 12), 1, 0, 1, "mean"),
    ((3, 130, 7, 7), (7, 7), 1, 0, 1, "mean"),
    ((1, 33, 12, 11), (3, 3), 1, 1, 1, "mean"),
    ((2, 17, 6, 13), (3, 3), 1, 2, 2, "max"),
    ((2, 24, 31), (5,), 2, 2, 1, "max"),
    ((1, 20, 5, 6, 7), (3, 3, 3), 1, 1, 1, "mean"),
    ((1, 8, 4, 4, 40), (2, 2, 4), 3, 0, 1, "max"),
    ((0, 8, 7, 7), (3, 3), 1, 1, 1, "max"),
)


# x, kernel, stride, padding, dilation, dtype
_BYTES: tuple[tuple[tuple[int, ...], tuple[int, ...], int, int, int, torch.dtype], ...] = (
    ((2, 150, 9, 8), (3, 3), 2, 1, 1, torch.uint8),
    ((1, 70, 6, 13), (3, 2), 1, 1, 2, torch.int8),
    ((2, 64, 31), (5,), 2, 2, 1, torch.uint8),
    ((1, 8, 4, 4, 40), (2, 2, 4), 3, 0, 1, torch.int8),
)


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory")."""
    if size != "test":
        images = 1 if size == "cache" else 64
        calls = (((images, 64, 112, 112), (3, 3), 2, 1, 1, "max"),)
    else:
        calls = _CALLS  # type: ignore[assignment]
    for shape, kernel, stride, padding, dilation, kind in calls:
        dims = len(kernel)
        x = channels_last(values(*shape, dtype=dtype))
        geometry = [stride] * dims, [padding, padding] * dims, [dilation] * dims
        yield Sample(f"{shape_name(shape)}-{kind}", (x, list(kernel), *geometry, kind))
    if size == "test":
        yield from _of_bytes()


def _of_bytes() -> Iterator[Sample]:
    for shape, kernel, stride, padding, dilation, dtype in _BYTES:
        x = channels_last(torch.randint(256, shape, dtype=torch.uint8, device="cpu").view(dtype))
        dims = len(kernel)
        geometry = [stride] * dims, [padding] * 2 * dims, [dilation] * dims
        name = f"{shape_name(shape)}-max-{str(dtype).removeprefix('torch.')}"
        yield Sample(name, (x, list(kernel), *geometry, "max"))


def cost(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    **rest: object,
) -> Cost:
    """Reads x, writes the result; an operation for each position of each window."""
    outputs = x.shape[0] * x.shape[1]
    for length in positions(x.shape, kernel_size, stride, padding, dilation):
        outputs *= length
    return Cost(x.nbytes + outputs * x.dtype.itemsize, outputs * torch.Size(kernel_size).numel())


op = register(pool, samples, cost)
