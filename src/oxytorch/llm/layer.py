"""A decoder layer as a record: weights and settings, and the few calls of ops that it takes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..ops import cached_attention
from ..ops.linear_panels import linear
from ..ops.moe import Experts, routed_mlp
from ..ops.panels import PanelWeight
from ..ops.panels.epilogues import ACTIVATIONS
from .cache import CacheLayer

UNKEPT = {"kept": False}
"""Of fields that say how a record follows its modules, which files (`description.py`) leave out."""


@dataclass(eq=False)
class Norm:
    """A normalization over the last dimension.

    Its parameters are those that the module has at the time of the call.
    kind: "rms_norm" or "layer_norm".
    offset: what is added to the weight (Gemma: 1).
    """

    kind: str
    module: nn.Module
    eps: float
    offset: float = 0.0
    _source: tuple[int, int] = (0, -1)
    _shifted: Tensor | None = None

    def weight(self) -> Tensor | None:
        """The factor that rows are multiplied with, [n]."""
        weight = self.module._parameters.get("weight")
        if weight is None or self.offset == 0.0:
            return weight
        source = (id(weight), weight._version)
        if self._source != source:
            self._shifted = weight.detach().float() + self.offset
            self._source = source  # last: another thread may look at it
        return self._shifted

    def renew(self) -> None:
        """After values were written: look at them again."""
        self._source = (0, -1)

    def takes(self, x: Tensor) -> bool:
        """Whether the kernels take such an input with the parameters that there are now."""
        weight = self.module._parameters.get("weight")
        dtypes = (torch.float32,) if x.dtype == torch.float32 else (torch.float32, x.dtype)
        return (
            x.device.type == "cpu"
            and x.dtype in (torch.float32, torch.bfloat16)
            and (weight is None or (weight.dtype in dtypes and x.shape[-1] == weight.shape[0]))
        )

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "rms_norm":
            return ops.rms_norm(x, self.weight(), self.eps)
        return ops.layer_norm(x, self.weight(), self.module._parameters.get("bias"), self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (norm of x + residual, x + residual)."""
        if self.kind == "rms_norm":
            pair = ops.add_rms_norm(x, residual, self.weight(), self.eps)
        else:
            bias = self.module._parameters.get("bias")
            pair = ops.add_layer_norm(x, residual, self.weight(), bias, self.eps)
        assert isinstance(pair, tuple)
        return pair


@dataclass(eq=False)
class Product:
    """x @ weight^T + bias, with what follows it in the same sweep.

    weight: [out, in]; packed, or plain and then in several calls.
    gated: weight has gate and up halves, which epilogues "..._mul" combine.
    order: int64 [in], or None: column i of the weight belongs to input order[i].
    sorted_from: the module whose bias is sorted for it, and the order of its rows, or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    gated: bool = False
    order: Tensor | None = None
    sorted_from: tuple[nn.Module, Tensor] | None = field(default=None, metadata=UNKEPT)

    def renew(self) -> None:
        """After values were written: sort them again."""
        if self.sorted_from is not None and self.bias is not None:
            module, rows = self.sorted_from
            self.bias.copy_(module.get_parameter("bias").detach()[rows])

    def __call__(self, x: Tensor, epilogue: str = "none", other: Tensor | None = None) -> Tensor:
        """Returns act(x @ weight^T + bias), + other, or act(gate) * up; see `linear_panels`."""
        if self.order is not None:
            x = x[..., self.order]
        if isinstance(self.weight, PanelWeight):
            return linear(x, self.weight, self.bias, epilogue=epilogue, other=other)
        result = F.linear(x, self.weight, self.bias)
        if epilogue == "none":
            return result
        if epilogue == "add":
            assert other is not None
            return result + other
        if not epilogue.endswith("_mul"):
            return ACTIVATIONS[epilogue](result)
        gate, up = result.chunk(2, dim=-1)
        return ACTIVATIONS[epilogue.removesuffix("_mul")](gate) * up


@dataclass(eq=False)
class RoutedMlp:
    """Routed experts: each token goes through the few whose router scores are largest.

    router: weight [experts, in].
    normalized: the chosen scores are divided by their sum.
    gate_up, down: a gated product and a plain one for each expert, in the model's order.
    """

    router: Product
    chosen: int
    normalized: bool
    gate_up: list[Product]
    down: list[Product]
    activation_fn: str
    packed: tuple[Experts, Experts] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        gate_up, down = _packed(self.gate_up), _packed(self.down)
        self.packed = None if gate_up is None or down is None else (gate_up, down)

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Returns the result, + residual where one is given."""
        return self.mixed(x, residual, *self.choose(x))

    def choose(self, x: Tensor, indices: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights and numbers of each token's experts, [tokens, chosen]; indices: these numbers."""
        rows = x.reshape(-1, x.shape[-1])
        scores = F.softmax(self.router(rows).float(), dim=-1)
        if indices is None:
            weights, indices = scores.topk(self.chosen, dim=-1)
        else:
            weights = scores.gather(-1, indices)
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, indices

    def mixed(self, x: Tensor, residual: Tensor | None, weights: Tensor, indices: Tensor) -> Tensor:
        """Returns the outputs of these experts times their weights, + residual if there is one."""
        if self.packed is None:
            rows = x.reshape(-1, x.shape[-1])
            result = self._one_by_one(rows, weights, indices).view(x.shape)
        else:
            result = routed_mlp(x, weights, indices, *self.packed, self.activation_fn)
        return result if residual is None else result + residual

    def _one_by_one(self, rows: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        result = torch.zeros(rows.shape, dtype=torch.float32, device="cpu")
        for expert in sorted({*indices.flatten().tolist()}):
            token, place = torch.where(indices == expert)
            hidden = self.gate_up[expert](rows[token], self.activation_fn + "_mul")
            found = self.down[expert](hidden).float() * weights[token, place, None]
            result.index_add_(0, token, found)
        return result.to(rows.dtype)


def _packed(products: list[Product]) -> Experts | None:
    """The weights of all experts as the op `moe` takes them, or None where they are not alike."""
    weights = [product.weight for product in products]
    forms = {
        (weight.format, weight.group_size, weight.activation_dtype, weight.zero_points is None)
        for weight in weights
        if isinstance(weight, PanelWeight)
    }
    plain = all(isinstance(weight, PanelWeight) for weight in weights)
    simple = all(product.bias is None and product.order is None for product in products)
    if not plain or not simple or len(forms) != 1:
        return None
    return Experts.of([weight for weight in weights if isinstance(weight, PanelWeight)])


@dataclass(eq=False)
class Mlp:
    """down(act(gate) * up), or down(act(up)) where `up` is not gated."""

    up: Product
    down: Product
    activation_fn: str

    def takes(self, x: Tensor) -> bool:
        """Whether the products take such an input."""
        return x.dtype in (torch.float32, torch.bfloat16)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns the result, + residual where one is given."""
        hidden = self.up(x, self.activation_fn + ("_mul" if self.up.gated else ""))
        if residual is None:
            return self.down(hidden)
        return self.down(hidden, "add", residual)


@dataclass(eq=False)
class Attention:
    """Self-attention over a cache.

    query, key, value of a token are rows of one product: `layout` "blocks" (all queries, all keys,
    all values) or "groups" (for each key head: its queries, its key, its value).
    query_norm, key_norm: normalization of each head, or None; with flat_norms of all heads as one
        row.
    rotary: 0 for none, else how many values of a head are rotated.
    interleaved: pairs of neighbours are rotated, not halves.
    window: the last tokens that are seen, or None for all.
    sinks: a logit for each head, or None.
    """

    qkv: Product
    output: Product
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    layout: str = "blocks"
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    rotary: int = 0
    interleaved: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    flat_norms: bool = False

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of query [batch, heads, n, head_dim], key and value [batch, kv_heads, ...]."""
        batch, length, _ = qkv.shape
        h, k = self.heads, self.kv_heads
        if self.layout == "blocks":
            parts = qkv.view(batch, length, h + 2 * k, self.head_dim).transpose(1, 2)
            return parts[:, :h], parts[:, h : h + k], parts[:, h + k :]
        each = h // k
        parts = qkv.view(batch, length, k, each + 2, self.head_dim)
        query = parts[:, :, :, :each].flatten(2, 3) if each > 1 else parts[:, :, :, 0]
        key, value = parts[:, :, :, each], parts[:, :, :, each + 1]
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [batch, heads, n, head_dim], key and value, as `cached_attention` takes them."""
        qkv = self.qkv(x)
        if not self.flat_norms:
            return self.split(qkv)
        assert self.query_norm is not None and self.key_norm is not None
        dims = [count * self.head_dim for count in (self.heads, self.kv_heads, self.kv_heads)]
        query, key, value = torch.split(qkv, dims, dim=-1)
        parts = (self.query_norm(query), self.key_norm(key), value)
        split = (*x.shape[:2], -1, self.head_dim)
        query, key, value = (part.reshape(split).transpose(1, 2) for part in parts)
        return query, key, value

    def __call__(
        self,
        x: Tensor,
        cache: CacheLayer,
        start: int | Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Tensor | None,
        beams: Tensor | None,
        windowed: bool = False,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Returns [batch, n, heads * head_dim], before the output product; see `DecoderLayer`."""
        query, key, value = self.projected(x)
        query_norm, key_norm = self.query_norm, self.key_norm
        if self.flat_norms:
            query_norm = key_norm = None  # applied already
        first, tensor = (0, start) if isinstance(start, Tensor) else (start, None)
        return cached_attention(
            query,
            key,
            value,
            cache.keys,
            cache.values,
            first,
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
            cos=cos if self.rotary else None,
            sin=sin if self.rotary else None,
            interleaved=self.interleaved,
            query_norm=None if query_norm is None else query_norm.weight(),
            key_norm=None if key_norm is None else key_norm.weight(),
            eps=1e-6 if query_norm is None else query_norm.eps,
            mask=mask,
            beams=beams,
            window=self.window if mask is None or windowed else None,
            softcap=self.softcap,
            sinks=self.sinks,
            scale=self.scale,
            causal=mask is None,
            start_tensor=tensor,
            cache_rows=rows,
        )


@dataclass(eq=False)
class DecoderLayer:
    """A decoder layer.

    attention_norm and mlp_norm come before their part, the `after_` norms behind it and before the
    residual is added; each may be absent.

    parallel: both parts read the layer's input.
    norm_last: attention_norm and mlp_norm are applied to the sums instead (OPT's 350 m).
    residual_scale: what both parts are multiplied with before they are added.
    """

    attention: Attention
    mlp: Mlp | RoutedMlp
    attention_norm: Norm | None = None
    mlp_norm: Norm | None = None
    after_attention_norm: Norm | None = None
    after_mlp_norm: Norm | None = None
    parallel: bool = False
    norm_last: bool = False
    residual_scale: float = 1.0
    description: str = field(default="", repr=False)

    def step(
        self,
        hidden: Tensor,
        cache: CacheLayer,
        start: int | Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        mask: Tensor | None = None,
        beams: Tensor | None = None,
        windowed: bool = False,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Returns the layer's output [batch, n, width] for `hidden` of the same shape.

        Keys and values are written to `cache` at start .. start + n.

        cos, sin: [n, rotary] or [batch, n, rotary].
        mask: None for causal attention in the layer's window; otherwise it says everything: bool or
            additive, broadcast to [batch, heads, n, start + n].
        windowed: the mask lets nothing through from before the layer's window, which need not be
            read then.
        beams: [batch, capacity], see `CacheLayer.plain`.
        rows: int64 [batch], the row of the cache that each sequence has, with `start` int64
            [batch], and without mask and beams.
        """
        normed = hidden
        if self.attention_norm is not None and not self.norm_last:
            normed = self.attention_norm(hidden)
        attended = self.attention(normed, cache, start, cos, sin, mask, beams, windowed, rows)
        output = self.attention.output
        if self.parallel:
            total = output(attended, "add", hidden)
            return self._mlp(normed if self.mlp_norm is None else self.mlp_norm(hidden), total)
        if self.after_attention_norm is not None:
            attended = self.after_attention_norm(output(attended))
            if self.mlp_norm is not None:
                return self._mlp(*self.mlp_norm.add(attended, hidden))
            total = attended + hidden
            return self._mlp(total, total)
        if self.residual_scale == 1.0:
            total = output(attended, "add", hidden)
        else:
            total = hidden + output(attended) * self.residual_scale
        if self.norm_last:
            assert self.attention_norm is not None and self.mlp_norm is not None
            total = self.attention_norm(total)
            return self.mlp_norm(self.mlp(total, total))
        return self._mlp(total if self.mlp_norm is None else self.mlp_norm(total), total)

    def _mlp(self, normed: Tensor, residual: Tensor) -> Tensor:
        if self.residual_scale != 1.0:
            return residual + self.mlp(normed, None) * self.residual_scale
        if self.after_mlp_norm is None:
            return self.mlp(normed, residual)
        return self.after_mlp_norm(self.mlp(normed, None)) + residual
