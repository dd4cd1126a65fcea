"""The predecessor's `llm.modules` and `llm.functional`, by ops of oxytorch and plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import ops
from .errors import not_served


class _Fused(nn.Module):
    """A linear layer and what follows it; `oxytorch.optimize` packs the layer."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear


class LinearSilu(_Fused):
    """silu(linear(x))."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(self.linear(x))


class LinearRelu(_Fused):
    """relu(linear(x))."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.linear(x))


class LinearGelu(_Fused):
    """gelu(linear(x))."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.linear(x))


class LinearNewGelu(_Fused):
    """gelu(linear(x)) by the formula with tanh."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.linear(x), approximate="tanh")


class LinearSiluMul(_Fused):
    """silu(linear(x)) * y."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ops.silu_mul(self.linear(x), y)


class LinearMul(_Fused):
    """linear(x) * y."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x) * y  # type: ignore[no-any-return]


class LinearAdd(_Fused):
    """linear(x) + y."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x) + y  # type: ignore[no-any-return]


class LinearAddAdd(_Fused):
    """linear(x) + y + z."""

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return self.linear(x) + y + z  # type: ignore[no-any-return]


class Linear2SiluMul(nn.Module):
    """silu(linear_s(x)) * linear_m(x)."""

    def __init__(self, linear_s: nn.Module, linear_m: nn.Module) -> None:
        super().__init__()
        self.linear_s, self.linear_m = linear_s, linear_m

    def forward(self, x: Tensor) -> Tensor:
        return ops.silu_mul(self.linear_s(x), self.linear_m(x))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, weight: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size) if weight is None else weight)
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.variance_epsilon)

    @classmethod
    def apply_function(cls, hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The norm without a module."""
        return rms_norm(hidden_states, weight, eps)


class FastLayerNorm(nn.Module):
    """Layer normalization over the last dimension."""

    def __init__(
        self,
        normalized_shape: tuple[int, ...],
        eps: float,
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape, self.eps = normalized_shape, eps
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return fast_layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    @classmethod
    def apply_function(
        cls,
        hidden_states: Tensor,
        normalized_shape: tuple[int, ...],
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        """The norm without a module."""
        return fast_layer_norm(hidden_states, normalized_shape, weight, bias, eps)


def rms_norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""
    return ops.rms_norm(hidden_states, weight, eps)


def fast_layer_norm(
    hidden_states: Tensor,
    normalized_shape: Any,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Layer normalization over `normalized_shape`."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if len(shape) != 1:
        return functional.layer_norm(hidden_states, shape, weight, bias, eps)
    return ops.layer_norm(hidden_states, weight, bias, eps)


def add_rms_norm(
    residual: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    add_back: bool = False,
) -> Tensor:
    """The RMS norm of x + residual; add_back: residual becomes the sum."""
    if residual is None:
        normed = ops.rms_norm(x, weight, eps)
    else:
        normed, total = ops.add_rms_norm(x, residual, weight, eps)
        if add_back:
            residual.copy_(total)
    return normed if bias is None else normed + bias


def add_layer_norm(
    residual: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    add_back: bool = False,
) -> Tensor:
    """The layer norm of x + residual; add_back: residual becomes the sum."""
    if residual is None:
        return ops.layer_norm(x, weight, bias, eps)
    normed, total = ops.add_layer_norm(x, residual, weight, bias, eps)
    if add_back:
        residual.copy_(total)
    return normed


def rotary_embedding(
    query: Tensor,
    key: Tensor,
    sin: Tensor,
    cos: Tensor,
    rotary_dim: int,
    rotary_half: bool,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Query and key, turned by the angles of their positions.

    query, key: [batch, length, heads, head_dim] or [tokens, heads, head_dim].
    sin, cos: [positions, rotary_dim or half of it].
    rotary_half: pairs are (i, i + rotary_dim / 2); False: neighbours.
    position_ids: which rows of sin and cos tokens take; None: the first ones.
    """
    angles = [_angles(table, rotary_dim, rotary_half) for table in (cos, sin)]

    def turned(x: Tensor) -> Tensor:
        length = x.shape[-3]
        rows = torch.arange(length, device=x.device) if position_ids is None else position_ids
        chosen = [table[rows.reshape(-1, length)].to(x.dtype) for table in angles]
        heads_first = x.transpose(-3, -2)
        if x.dim() == 3:
            heads_first = heads_first.unsqueeze(0)
        found = ops.rotary_embedding(heads_first, chosen[0], chosen[1], not rotary_half)
        return found.transpose(1, 2).reshape(x.shape)

    return turned(query), turned(key)


def _angles(table: Tensor, rotary_dim: int, rotary_half: bool) -> Tensor:
    """A column for each of the rotated dimensions."""
    table = table.reshape(-1, table.shape[-1])
    if table.shape[-1] == rotary_dim:
        return table
    return torch.cat((table, table), -1) if rotary_half else table.repeat_interleave(2, -1)


def _into(out: Tensor | None, values: Tensor) -> Tensor:
    return values if out is None else out.copy_(values)


def silu_mul(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(x) * y."""
    return _into(out, ops.silu_mul(x, y))


def gelu_mul(x: Tensor, y: Tensor, out: Tensor | None = None, approximate: str = "none") -> Tensor:
    """gelu(x) * y."""
    return _into(out, ops.gelu_mul(x, y, approximate))


def silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """silu of the first half of the last dimension, times the second."""
    gate, up = x.chunk(2, -1)
    return _into(out, ops.silu_mul(gate, up))


def gelu_and_mul(x: Tensor, out: Tensor | None = None, approximate: str = "none") -> Tensor:
    """gelu of the first half of the last dimension, times the second."""
    gate, up = x.chunk(2, -1)
    return _into(out, ops.gelu_mul(gate, up, approximate))


def gelu_quick(x: Tensor, out: Tensor | None = None) -> Tensor:
    """x * sigmoid(1.702 x)."""
    return _into(out, x * torch.sigmoid(1.702 * x))


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    seqlen_q: Tensor,
    seqlen_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    pdropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    return_softmax: bool,
    gen_: Any,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = -1.0,
) -> Tensor:
    """Attention within each of several sequences, written to `out`, which is returned.

    query, key, value: [tokens, heads, head_size].
    seqlen_q, seqlen_k: where sequences begin, and the number of tokens.
    is_causal: a query sees the keys up to its own place, counted from the first of both.
    """
    unserved: dict[str, bool] = {
        "alibi_slopes": alibi_slopes is not None,
        "pdropout": pdropout != 0,
        "return_softmax": return_softmax,
        "window_size_left and window_size_right": (window_size_left, window_size_right) != (-1, -1),
        "softcap": softcap > 0,
    }
    for name, is_given in unserved.items():
        if is_given:
            raise not_served(
                f"varlen_attention with {name}",
                "use oxytorch.ops.attention with a mask, for each sequence",
            )
    starts, key_starts = seqlen_q.tolist(), seqlen_k.tolist()
    for index in range(len(starts) - 1):
        own = slice(starts[index], starts[index + 1])
        keys = slice(key_starts[index], key_starts[index + 1])
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query[own], key[keys], value[keys]))
        found = ops.attention(q, k, v, None, softmax_scale, is_causal)
        out[own] = found[0].transpose(0, 1)
    return out


class VarlenAttention(nn.Module):
    """`varlen_attention` as a module."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return varlen_attention(*args, **kwargs)

    apply_function: Callable[..., Tensor] = staticmethod(varlen_attention)
