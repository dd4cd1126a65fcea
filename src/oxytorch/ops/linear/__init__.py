"""Dense linear layer with a weight packed once, and what follows it in the same sweep.

Weights lie in panels, which `linear_panels` multiplies, or in the order of oneDNN, whose product in
torch already chooses among AVX2, AVX-512, BF16 and AMX. Panels are faster for few rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch.nn import functional as F

from ...core.packed_call import PackedProduct
from ...core.placement import empty_bytes
from ...core.reordered import ReorderedTensor
from .._binding import is_compiled
from .._op import Cost, Sample, nbytes, register_onednn
from .._samples import values
from ..linear_panels import linear_panels
from ..pack_panels import pack_panels
from ..panels.formats import PLAIN_NAMES
from ..post_op import NO_POST_OP, PostOp, with_post_op
from ..unpack_panels import unpack_panels

_MKLDNN = torch.ops.mkldnn


class PackedLinearWeight(ReorderedTensor):
    """A weight in panels or in oneDNN's order: [out_features, in_features], or transposed.

    weight: the values; dtype: that of the stored values, by default the weight's.
    transposed: the weight is [in_features, out_features], as in GPT-2's Conv1D.
    in_panels: whether it lies in panels where its dtype can; by default float32 does.
    least_rows: with fewer rows the plain values are multiplied, which the weight then keeps.
    most_rows: with more rows than that, where it is not 0, either the plain values are multiplied
        as well, or the values in oneDNN's order (`has_other_order`), which lie beside the panels.
    """

    transposed: bool = False
    in_panels: bool = False
    least_rows: int = 0
    most_rows: int = 0
    has_other_order: bool = False
    _shared_fields = ("transposed", "in_panels", "least_rows", "most_rows", "has_other_order")

    def __new__(
        cls,
        weight: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        transposed: bool = False,
        in_panels: bool | None = None,
    ) -> PackedLinearWeight:
        dtype = dtype or weight.dtype
        result = ReorderedTensor._wrap(cls, weight.shape, dtype)
        result.transposed = transposed
        result.in_panels = dtype == torch.float32 if in_panels is None else in_panels
        result.repack(weight)
        return result

    def repack(self, values: torch.Tensor) -> None:
        super().repack(values)
        self.cell.keeps_plain |= self.takes_plain

    @property
    def takes_plain(self) -> bool:
        """Whether products with some numbers of rows take the plain values."""
        return self.least_rows > 0 or (self.most_rows > 0 and not self.has_other_order)

    def keep_plain_below(self, least_rows: int, plain: torch.Tensor) -> None:
        """Have products with fewer rows take `plain`, the plain values, from now on."""
        self.least_rows = least_rows
        self.cell.keeps_plain, self.cell.plain = True, plain

    def keep_beside_above(self, most_rows: int, plain: torch.Tensor, has_other_order: bool) -> None:
        """Have products with more rows take `plain`, the plain values, or these in oneDNN's order
        from now on."""
        self.most_rows, self.has_other_order = most_rows, has_other_order
        if has_other_order:
            self.repack(plain)
        else:
            self.cell.keeps_plain, self.cell.plain = True, plain

    def why_not_packed(self) -> str | None:
        return "it is no matrix" if self.dim() != 2 else supports(self.dtype)

    @property
    def out_features(self) -> int:
        return self.shape[1 if self.transposed else 0]

    @property
    def in_features(self) -> int:
        return self.shape[0 if self.transposed else 1]

    def _pack(self, stored: torch.Tensor) -> torch.Tensor:
        if self.in_panels and can_lie_in_panels(self.dtype):
            panels = pack_panels(self._turned(stored), PLAIN_NAMES[self.dtype])
            return empty_bytes(panels.numel()).view(panels.shape).copy_(panels)
        return self._reordered(stored)

    def _pack_beside(self, stored: torch.Tensor) -> torch.Tensor | None:
        return self._reordered(stored) if self.has_other_order else None

    def _turned(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.t().contiguous() if self.transposed else stored

    def _reordered(self, stored: torch.Tensor) -> torch.Tensor:
        reordered: torch.Tensor
        reordered = _MKLDNN._reorder_linear_weight.default(self._turned(stored), None)
        return reordered

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        plain: torch.Tensor
        if packed.is_mkldnn:
            plain = packed.to_dense()
        else:
            format = PLAIN_NAMES[self.dtype]
            plain = unpack_panels(packed, format, self.out_features, self.in_features)
        return plain.t().contiguous() if self.transposed else plain

    def _column(self, scale: torch.Tensor) -> torch.Tensor:
        return scale if self.transposed else scale[:, None]

    def product(self) -> PackedProduct | None:
        """The product with this weight as it is now, for numbers of rows that the packed form is
        meant for; None where that is not all that a call depends on."""
        cell = self.cell
        version = cell.clock._version
        stored = cell.stored
        is_usual = not cell.is_out and cell.relatives is None and stored is not None
        if not is_usual or stored.packed is None or stored.scale is not None:
            return None
        packed = stored.packed
        return PackedProduct(
            packed, None if packed.is_mkldnn else PLAIN_NAMES[self.dtype], self.in_features,
            self.out_features, max(self.least_rows, 1), self.most_rows or sys.maxsize, cell.clock,
            version,
        )  # fmt: skip


def can_lie_in_panels(dtype: torch.dtype) -> bool:
    """Whether packed weights of this dtype may lie in panels; else they lie in oneDNN's order."""
    return dtype in PLAIN_NAMES and is_compiled("linear_panels")


def supports(dtype: torch.dtype) -> str | None:
    """Return None where this dtype is multiplied well on this CPU, else the reason why not."""
    if dtype == torch.float32:
        return None
    if dtype == torch.bfloat16:
        if _MKLDNN._is_mkldnn_bf16_supported():
            return None
        return "oneDNN has no bfloat16 products on this CPU (needs AVX512BW or AVX-NE-CONVERT)"
    if dtype == torch.float16:
        if _MKLDNN._is_mkldnn_fp16_supported():
            return None
        return "oneDNN has no float16 products on this CPU (needs AVX512-FP16 or AVX-NE-CONVERT)"
    return f"oneDNN has no {dtype} products"


def linear(
    x: torch.Tensor,
    weight: PackedLinearWeight,
    bias: torch.Tensor | None = None,
    post_op: PostOp = NO_POST_OP,
    other: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute post_op(x @ weight.T + bias), with the weight's scale, if any, applied.

    x: [..., in_features], of the weight's dtype.
    weight: one that `is_packed`.
    bias: [out_features].
    other: the second operand of `post_op.binary`, [..., out_features]; one that the product cannot
        take in its own sweep (another shape or dtype) is combined afterwards.

    Returns [..., out_features] in the weight's dtype. Products are accumulated in float32. For
    inference: autograd does not follow it.
    """
    result: torch.Tensor
    is_for_more = weight.most_rows and x.numel() > weight.most_rows * x.shape[-1]
    is_for_fewer = weight.least_rows and x.numel() < weight.least_rows * x.shape[-1]
    if is_for_fewer or (is_for_more and not weight.has_other_order):
        plain = weight.cell.plain if weight.scale is None else None
        if plain is not None:
            result = F.linear(x, plain.t() if weight.transposed else plain, bias)
            return result if post_op is NO_POST_OP else post_op.after_(result, other)
    packed = weight.beside if is_for_more else None
    if packed is None:
        packed = weight.packed
    if not packed.is_mkldnn:
        return _linear_in_panels(x, weight, bias, post_op, other)
    if bias is not None:
        if bias.dim() != 1:  # oneDNN leaves out a scalar
            raise RuntimeError(
                f"linear: expected bias of shape [{weight.out_features}], got {list(bias.shape)}"
            )
        bias = bias.contiguous()  # which oneDNN takes for granted
    if post_op.binary is None and post_op.is_fused:
        result = _MKLDNN._linear_pointwise.default(
            x, packed, bias, post_op.onednn_name, post_op.scalars, post_op.algorithm
        )
        return result
    if other is not None and post_op.name == "none" and _is_like_result(other, x, weight):
        result = _MKLDNN._linear_pointwise.binary(x, other, packed, bias, post_op.binary)
        return result
    result = _MKLDNN._linear_pointwise.default(x, packed, bias, "none", [], "")
    return post_op.after_(result, other)


def _is_like_result(other: torch.Tensor, x: torch.Tensor, weight: PackedLinearWeight) -> bool:
    return (
        other.dtype == x.dtype
        and other.dim() == x.dim()
        and other.shape[:-1] == x.shape[:-1]
        and other.shape[-1] == weight.out_features
        and x.numel() != 0
    )


def _linear_in_panels(
    x: torch.Tensor,
    weight: PackedLinearWeight,
    bias: torch.Tensor | None,
    post_op: PostOp,
    other: torch.Tensor | None,
) -> torch.Tensor:
    if x.dim() == 0 or x.shape[-1] != weight.in_features:  # panels of about as many look alike
        raise RuntimeError(
            f"linear: expected x of shape [..., {weight.in_features}], got {list(x.shape)}"
        )
    epilogue = post_op.epilogue
    if other is not None and not _is_like_result(other, x, weight):
        epilogue = None
    second = None if epilogue is None else other
    result = linear_panels(
        x, PLAIN_NAMES[weight.dtype], weight.packed, None, None, None, weight.out_features, bias,
        second, epilogue or "none",
    )  # fmt: skip
    return post_op.after_(result, other) if epilogue is None else result


def _product(
    x: torch.Tensor, weight: PackedLinearWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    plain = weight.dense().to(x.dtype)
    return F.linear(x, plain.t() if weight.transposed else plain, bias)


POST_OPS = (
    NO_POST_OP,
    PostOp("relu"),
    PostOp("sigmoid"),
    PostOp("tanh"),
    PostOp("silu"),
    PostOp("hardswish"),
    PostOp("hardsigmoid"),
    PostOp("leaky_relu", (0.1,)),
    PostOp("hardtanh", (-0.5, 1.5)),
    PostOp("gelu", algorithm="none"),
    PostOp("gelu", algorithm="tanh"),
    PostOp(binary="add"),
    PostOp("relu", binary="add", other_first=True),
    PostOp(binary="sub"),
    PostOp("gelu", algorithm="none", binary="mul"),
)
"""What sample calls do with a result."""


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory"); none of dtypes without."""
    if supports(dtype) is not None:
        return
    if size != "test":
        rows, width = (4, 512) if size == "cache" else (4, 8192)
        weight = PackedLinearWeight(values(width, width, dtype=dtype) / width**0.5)
        yield Sample(f"{rows}x{width}x{width}", (values(rows, width, dtype=dtype), weight))
        return
    for shape, outputs in (((1, 64), 32), ((3, 17), 40), ((2, 3, 33), 1), ((40, 128), 100)):
        plain = values(outputs, shape[-1], dtype=dtype) / shape[-1] ** 0.5
        x, bias = values(*shape, dtype=dtype), values(outputs, dtype=dtype)
        name = "x".join(map(str, (*shape, outputs)))
        yield Sample(name, (x, PackedLinearWeight(plain), bias))
        transposed = PackedLinearWeight(plain.t().contiguous(), transposed=True)
        yield Sample(name + "-transposed", (x, transposed))
        if can_lie_in_panels(dtype):
            turned = PackedLinearWeight(plain, in_panels=dtype != torch.float32)
            yield Sample(name + "-otherwise", (x, turned, bias))
    weight, x = PackedLinearWeight(values(24, 16, dtype=dtype) / 4), values(5, 16, dtype=dtype)
    bias, other = values(24, dtype=dtype), values(5, 24, dtype=dtype)
    for post_op in POST_OPS:
        given = other if post_op.binary else None
        yield Sample(
            f"5x16x24-{str(post_op) or 'none'}{post_op.algorithm}",
            (x, weight, bias, post_op, given),
        )


def cost(x: torch.Tensor, weight: PackedLinearWeight, **rest: object) -> Cost:
    """Reads x, weight, bias and other, writes the result."""
    rows = x.numel() // x.shape[-1]
    moved = nbytes((x, weight, rest)) + rows * weight.out_features * x.dtype.itemsize
    return Cost(moved, 2 * rows * weight.numel())


op = register_onednn(linear, with_post_op(_product), samples, cost)
