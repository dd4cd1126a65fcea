"""Dense linear layer with a weight packed once, and what follows it in the same sweep.

The product runs in oneDNN inside torch: it already chooses among AVX2, AVX-512, BF16 and AMX.
"""

from __future__ import annotations

from typing import Any

import torch

from ...core.packed import PackedTensor
from .._post_op import NO_POST_OP, PostOp

_MKLDNN = torch.ops.mkldnn


class PackedLinearWeight(PackedTensor):
    """A weight in oneDNN's blocked order: [out_features, in_features], or transposed.

    The order suits every number of rows (measured from 1 to 512), so one copy is enough.

    weight: the values; dtype: that of the stored values, by default the weight's.
    transposed: the weight is [in_features, out_features], as in GPT-2's Conv1D.
    scale: see `PackedTensor`; float32 [out_features].
    """

    transposed: bool = False
    _shared_fields = (*PackedTensor._shared_fields, "transposed")

    def __new__(
        cls,
        weight: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        transposed: bool = False,
        scale: torch.Tensor | None = None,
    ) -> PackedLinearWeight:
        result = PackedTensor._wrap(cls, weight, dtype)
        result.transposed, result.scale = transposed, scale
        result.repack(weight)
        return result

    @property
    def out_features(self) -> int:
        return self.shape[1 if self.transposed else 0]

    def _pack(self, stored: torch.Tensor) -> torch.Tensor:
        plain = stored.t().contiguous() if self.transposed else stored
        packed: torch.Tensor = _MKLDNN._reorder_linear_weight.default(plain, None)
        return packed

    def _unpack(self) -> torch.Tensor:
        plain: torch.Tensor = self.packed.to_dense()
        return plain.t().contiguous() if self.transposed else plain

    def _column(self, scale: torch.Tensor) -> torch.Tensor:
        return scale if self.transposed else scale[:, None]

    def as_multiplied(self, values: torch.Tensor | None) -> torch.Tensor:
        """Plain values of this weight as the product uses them: [out, in], scaled if folded."""
        assert values is not None
        if self.scale is not None:
            values = (values * self._column(self.scale)).to(self.dtype)
        return values.t() if self.transposed else values


def supports(dtype: torch.dtype) -> str | None:
    """Return None where oneDNN multiplies this dtype well on this CPU, else the reason why not."""
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
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    post_op: PostOp = NO_POST_OP,
    other: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute post_op(x @ weight.T + bias), with a packed weight's scale, if any, applied.

    x: [..., in_features]; another floating dtype than the weight's is cast to it.
    weight: packed (`PackedLinearWeight`), or plain [out_features, in_features].
    bias: [out_features]. other: the second operand of `post_op.binary`, [..., out_features]; one
    that the product cannot take in its own sweep (another shape or dtype) is combined afterwards.
    Returns [..., out_features] in the weight's dtype. Products are accumulated in float32.
    Differentiable: the backward pass is that of the plain formula over the restored weight.
    """
    if x.dtype != weight.dtype:
        x = x.to(weight.dtype)
    if type(weight) is not PackedLinearWeight:
        return reference(x, weight, bias, post_op, other)
    if torch.is_grad_enabled() and (
        x.requires_grad
        or weight.requires_grad
        or (bias is not None and bias.requires_grad)
        or (other is not None and other.requires_grad)
    ):
        result: torch.Tensor = _LinearWithGradient.apply(x, weight, bias, post_op, other)  # type: ignore[no-untyped-call]
        return result
    return _packed_linear(x, weight, bias, post_op, other)


def _packed_linear(
    x: torch.Tensor,
    weight: PackedLinearWeight,
    bias: torch.Tensor | None,
    post_op: PostOp,
    other: torch.Tensor | None,
) -> torch.Tensor:
    result: torch.Tensor
    if other is None:
        result = _MKLDNN._linear_pointwise.default(
            x, weight.packed, bias, post_op.name, post_op.scalars, post_op.algorithm
        )
        return result
    if (
        post_op.name == "none"
        and other.dtype == x.dtype
        and other.dim() == x.dim()
        and other.shape[:-1] == x.shape[:-1]
        and other.shape[-1] == weight.out_features
        and x.numel() != 0
    ):
        result = _MKLDNN._linear_pointwise.binary(x, other, weight.packed, bias, post_op.binary)
        return result
    result = _MKLDNN._linear_pointwise.default(x, weight.packed, bias, "none", [], "")
    return post_op.after(result, other)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    post_op: PostOp = NO_POST_OP,
    other: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain PyTorch."""
    return post_op.after(torch.nn.functional.linear(x, weight, bias), other)


class _LinearWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: PackedLinearWeight,
        bias: torch.Tensor | None,
        post_op: PostOp,
        other: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.post_op = post_op
        ctx.save_for_backward(x, bias, other)
        ctx.weight = weight
        return _packed_linear(x, weight, bias, post_op, other)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, bias, other = ctx.saved_tensors
        needed = (*ctx.needs_input_grad[:3], ctx.needs_input_grad[4])
        weight = ctx.weight
        values = [
            None if value is None else value.detach().requires_grad_(need)
            for value, need in zip((x, weight.dense(), bias, other), needed, strict=True)
        ]
        with torch.enable_grad():
            plain = weight.as_multiplied(values[1])
            result = reference(values[0], plain, values[2], ctx.post_op, values[3])  # type: ignore[arg-type]
        wanted = [v for v, need in zip(values, needed, strict=True) if v is not None and need]
        found = iter(torch.autograd.grad(result, wanted, gradients))
        x_, weight_, bias_, other_ = (
            next(found) if v is not None and need else None
            for v, need in zip(values, needed, strict=True)
        )
        return x_, weight_, bias_, None, other_
