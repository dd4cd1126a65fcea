"""Convolution with a weight packed once, and what follows it in the same sweep.

The arithmetic runs in oneDNN inside torch, which chooses among AVX2, AVX-512, BF16 and AMX.
Results come in channels-last order, the order that oneDNN's kernels like best.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ...core.reordered import ReorderedTensor
from .._op import Cost, Sample, nbytes, register_onednn
from .._samples import shape_name, values
from ..linear import POST_OPS, supports
from ..post_op import NO_POST_OP, PostOp, with_post_op

T = TypeVar("T")

_MKLDNN = torch.ops.mkldnn
_POINTWISE: Any = _MKLDNN._convolution_pointwise.default

MOST_SIZES, MOST_OF_SIZES = 16, 4 << 20
"""Sizes of inputs besides the usual one for which the faster order of a weight is known, and
bytes of the orders besides the usual one, unless it is one."""
GAIN = 0.7
"""The part of the time with the usual order that another one may take to be kept."""


@dataclass(frozen=True)
class Geometry:
    """Stride, padding and dilation, one number for each spatial dimension, and groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def padded(self, extra: tuple[int, ...]) -> Geometry:
        """The same with more zeros around the input."""
        padding = tuple(p + e for p, e in zip(self.padding, extra, strict=True))
        return Geometry(self.stride, padding, self.dilation, self.groups)

    def with_height(self) -> Geometry:
        """The same convolution over one more spatial dimension of size 1."""
        return Geometry((1, *self.stride), (0, *self.padding), (1, *self.dilation), self.groups)


def needed_dilation(dilation: Sequence[T], kernel_size: Sequence[int], one: T) -> list[T]:
    """Dilations that are `one` where a kernel has one element, which others do not change: oneDNN
    crashes on some in bfloat16 with channels last."""
    return [one if n == 1 else d for d, n in zip(dilation, kernel_size, strict=True)]


class PackedConvolutionWeight(ReorderedTensor):
    """A weight [out_channels, in_channels / groups, *kernel] in oneDNN's blocked order.

    weight: the values; 1, 2 or 3 spatial dimensions.
    dtype: that of the stored values.
    input_size: the usual input's shape, where known: oneDNN may choose a better order for it.
    """

    geometry: Geometry
    input_size: tuple[int, ...] | None = None
    _shared_fields = ("geometry", "input_size")

    def __new__(
        cls,
        weight: torch.Tensor,
        geometry: Geometry,
        *,
        dtype: torch.dtype | None = None,
        input_size: tuple[int, ...] | None = None,
    ) -> PackedConvolutionWeight:
        result = ReorderedTensor._wrap(cls, weight.shape, dtype or weight.dtype)
        result.geometry, result.input_size = geometry, input_size
        result.repack(weight)
        return result

    @property
    def kernel_geometry(self) -> Geometry:
        """The geometry that oneDNN sees: a 1-D convolution runs as a 2-D one of height 1."""
        return self.geometry.with_height() if self.dim() == 3 else self.geometry

    def packed_for(self, x: torch.Tensor, call: Callable[[torch.Tensor], object]) -> torch.Tensor:
        """What the kernel reads for an input.

        An input of another size than the usual one may ask for another order, into which oneDNN
        then brings the weight at every call, element by element where it has no kernel for that.
        So the first such input is computed with both, and the weight is kept in its order too where
        that is faster.

        call: computes with a packed weight.
        """
        stored, size = self._current(), self.input_size
        usual = stored.packed
        assert usual is not None
        if size is None or x.shape == size:
            return usual
        key, known = tuple(x.shape), stored.for_sizes
        found = known.get(key)
        if found is None:
            if len(known) >= MOST_SIZES:
                return usual
            others = sum(each is not usual for each in [*known.values()])
            nbytes = (others + 1) * self.numel() * self.dtype.itemsize
            is_full = others > 0 and nbytes > MOST_OF_SIZES
            found = known[key] = usual if is_full else self._faster(usual, key, call)
        return found

    def _faster(
        self, usual: torch.Tensor, size: tuple[int, ...], call: Callable[[torch.Tensor], object]
    ) -> torch.Tensor:
        other = self._reordered(self._unpack(usual), size)
        return other if _seconds(call, other) < GAIN * _seconds(call, usual) else usual

    def _pack(self, stored: torch.Tensor) -> torch.Tensor:
        return self._reordered(stored, self.input_size)

    def _reordered(self, stored: torch.Tensor, size: tuple[int, ...] | None) -> torch.Tensor:
        if self.dim() == 3:
            stored = stored.unsqueeze(2)
            size = None if size is None else (*size[:2], 1, *size[2:])
        g = self.kernel_geometry
        packed: torch.Tensor = _MKLDNN._reorder_convolution_weight.default(
            stored, g.padding, g.stride, g.dilation, g.groups, size
        )
        return packed

    def why_not_packed(self) -> str | None:
        return supports(self.dtype)

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        plain: torch.Tensor = packed.to_dense()
        return plain.reshape(self.shape)


def _seconds(call: Callable[[torch.Tensor], object], packed: torch.Tensor) -> float:
    """Of the second call, which finds the memory that the first one has used."""
    call(packed)
    begin = time.perf_counter()
    call(packed)
    return time.perf_counter() - begin


def takes(x: torch.Tensor, weight: PackedConvolutionWeight) -> bool:
    """Whether oneDNN computes the convolution of this x: one with a batch, and not empty."""
    return x.dim() == weight.dim() and x.numel() != 0


def convolution(
    x: torch.Tensor,
    weight: PackedConvolutionWeight,
    bias: torch.Tensor | None = None,
    post_op: PostOp = NO_POST_OP,
    other: torch.Tensor | None = None,
    extra_padding: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Compute post_op(scale * convolution(x, weight) + bias), scale being the weight's, if any.

    x: [batch, channels, *spatial], of the weight's dtype.
    weight: one that `is_packed`.
    bias: [out_channels].
    other: the second operand of `post_op.binary`, of the result's shape.
    extra_padding: zeros on both sides of each spatial dimension, besides the layer's own padding.

    Returns the result in the weight's dtype. Products are accumulated in float32. For inference:
    autograd does not follow it.
    """
    g = weight.kernel_geometry
    if extra_padding is not None:
        g = g.padded((0,) * (len(g.padding) - len(extra_padding)) + extra_padding)
    given = x
    if weight.dim() == 3:
        x = x.unsqueeze(2)
        other = None if other is None else other.unsqueeze(2)
    geometry = g.padding, g.stride, g.dilation, g.groups
    if bias is not None:
        bias = bias.contiguous()  # which oneDNN takes for granted
    packed = weight.packed_for(
        given, lambda order: _POINTWISE(x, order, bias, *geometry, "none", [], "")
    )
    result: torch.Tensor
    if post_op.binary is None:
        fused = post_op if post_op.is_fused else NO_POST_OP
        result = _POINTWISE(
            x, packed, bias, *geometry, fused.onednn_name, fused.scalars, fused.algorithm
        )
        if fused is not post_op:
            result = post_op.after_(result)
    elif other is not None and _fits(x, other, weight, g):
        result = _MKLDNN._convolution_pointwise.binary(
            x, other, packed, bias, *geometry, post_op.binary, 1.0, None, [], None
        )
        result = post_op.without_binary().after_(result)
    else:
        result = _POINTWISE(x, packed, bias, *geometry, "none", [], "")
        result = post_op.after(result, other)
    return result.squeeze(2) if weight.dim() == 3 else result


def _fits(
    x: torch.Tensor, other: torch.Tensor, weight: PackedConvolutionWeight, g: Geometry
) -> bool:
    """Whether `other` has exactly the result's dtype and shape (nothing is broadcast)."""
    if other.dtype != weight.dtype or other.dim() != x.dim() or other.shape[0] != x.shape[0]:
        return False
    kernel = (1, *weight.shape[2:]) if weight.dim() == 3 else weight.shape[2:]
    return other.shape[1] == weight.shape[0] and all(
        other.shape[i + 2]
        == (x.shape[i + 2] + 2 * g.padding[i] - g.dilation[i] * (kernel[i] - 1) - 1) // g.stride[i]
        + 1
        for i in range(len(kernel))
    )


def _product(
    x: torch.Tensor,
    weight: PackedConvolutionWeight,
    bias: torch.Tensor | None,
    extra_padding: tuple[int, ...] | None,
) -> torch.Tensor:
    g = weight.geometry if extra_padding is None else weight.geometry.padded(extra_padding)
    none = [0] * len(g.stride)
    return torch.convolution(
        x, weight.dense().to(x.dtype), bias, g.stride, g.padding, g.dilation, False, none, g.groups
    )


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory"); none of dtypes without."""
    if supports(dtype) is not None:
        return
    if size != "test":
        batch, channels, side = (1, 32, 14) if size == "cache" else (8, 256, 56)
        x = values(batch, channels, side, side, dtype=dtype)
        yield Sample(shape_name(x.shape), (x, _weight(dtype, channels, channels, (3, 3))))
        return
    for shape, out_channels, kernel, stride, dilation, groups in (
        ((1, 3, 9, 8), 16, (3, 3), 1, 1, 1),
        ((2, 8, 7, 7), 8, (1, 1), 2, 1, 1),
        ((2, 8, 9, 9), 8, (3, 3), 1, 2, 8),
        ((2, 6, 17), 4, (5,), 2, 1, 2),
        ((1, 4, 5, 6, 7), 3, (3, 2, 3), 1, 1, 1),
    ):
        x = values(*shape, dtype=dtype)
        weight = _weight(dtype, out_channels, shape[1], kernel, stride, dilation, groups)
        yield Sample(shape_name(shape), (x, weight, values(out_channels, dtype=dtype)))
        extra = tuple(1 for _ in kernel)
        yield Sample(shape_name(shape) + "-padded", (x, weight), {"extra_padding": extra})
    x, weight = values(2, 4, 6, 5, dtype=dtype), _weight(dtype, 8, 4, (3, 3))
    bias, other = values(8, dtype=dtype), values(2, 8, 6, 5, dtype=dtype)
    for post_op in POST_OPS:
        given = other if post_op.binary else None
        yield Sample(
            f"2x4x6x5-{str(post_op) or 'none'}{post_op.algorithm}",
            (x, weight, bias, post_op, given),
        )


def _weight(
    dtype: torch.dtype,
    out_channels: int,
    in_channels: int,
    kernel: tuple[int, ...],
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
) -> PackedConvolutionWeight:
    plain = values(out_channels, in_channels // groups, *kernel, dtype=dtype)
    size = len(kernel)
    padding = tuple(length // 2 for length in kernel)
    geometry = Geometry((stride,) * size, padding, (dilation,) * size, groups)
    return PackedConvolutionWeight(plain / plain[0].numel() ** 0.5, geometry)


def cost(
    x: torch.Tensor,
    weight: PackedConvolutionWeight,
    extra_padding: tuple[int, ...] | None,
    **rest: object,
) -> Cost:
    """Reads x, weight, bias and other, writes the result."""
    g = weight.geometry if extra_padding is None else weight.geometry.padded(extra_padding)
    positions = x.shape[0]
    for i, length in enumerate(weight.shape[2:]):
        reach = g.dilation[i] * (length - 1)
        positions *= (x.shape[i + 2] + 2 * g.padding[i] - reach - 1) // g.stride[i] + 1
    moved = nbytes((x, weight, rest)) + positions * weight.shape[0] * x.dtype.itemsize
    return Cost(moved, 2 * positions * weight.numel())


op = register_onednn(convolution, with_post_op(_product), samples, cost)
