"""A plan: which submodule of a decoder layer plays which part; from it the fused layer is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .layer import Attention, DecoderLayer, Mlp, Norm, Product, RoutedMlp


@dataclass(frozen=True)
class NormPlan:
    """A norm: the path of its module and what it computes (see `layer.Norm`)."""

    path: str
    kind: str
    eps: float
    offset: float = 0.0

    def build(self, layer: nn.Module) -> Norm:
        return Norm(self.kind, layer.get_submodule(self.path), self.eps, self.offset)


@dataclass(frozen=True)
class ProductPlan:
    """Linear layers that are computed as one, in this order.

    paths: of modules with `weight` [out, in] ([in, out] if transposed) and perhaps `bias`.
    gated: the first half of the rows is a gate.
    grouped: heads per key head, where the rows of a key head's queries, key and value lie together
        and are to be sorted into three blocks; else 0.
    head_dim: rows of one head, for `grouped`.
    """

    paths: tuple[str, ...]
    transposed: bool = False
    gated: bool = False
    grouped: int = 0
    head_dim: int = 0

    def rows(self, total: int) -> Tensor | None:
        """The order in which the rows are stored, or None where it is that of the modules."""
        if not self.grouped:
            return None
        each = self.grouped
        index = torch.arange(total, device="cpu").view(-1, each + 2, self.head_dim)
        parts = (index[:, :each], index[:, each], index[:, each + 1])
        return torch.cat([part.reshape(-1) for part in parts])


@dataclass(frozen=True)
class ExpertsPlan:
    """Routed experts.

    router: path of the module whose `weight` gives scores.
    stacked: paths of the parameters of all experts [experts, 2 * middle, in] and [experts, out,
        middle], or None; then gate_up and down have a plan for each expert.
    """

    router: str
    chosen: int
    normalized: bool
    stacked: tuple[str, str] | None
    gate_up: tuple[ProductPlan, ...] = ()
    down: tuple[ProductPlan, ...] = ()


@dataclass(frozen=True)
class LayerPlan:
    """All that is known about a decoder layer; paths are relative to it.

    rotary_argument: the argument that brings cos and sin, or None.
    interleaved: whether neighbours are rotated together; else values of the two halves.
    repeat_interleave: cos and sin come for halves, and each value is repeated for its neighbour.
    cache_argument: the argument that brings the cache.
    index: the layer's number in the cache.
    arguments: names of all that the layer is called with.
    results: 0 if the layer returns a tensor, else the length of the tuple that it returns.
    The other fields are those of `layer.DecoderLayer` and `layer.Attention`.
    """

    attention: str
    qkv: ProductPlan
    output: ProductPlan
    layout: str
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    activation_fn: str
    block_order: str
    index: int
    up: ProductPlan | None = None
    down: ProductPlan | None = None
    experts: ExpertsPlan | None = None
    mlp: str = ""
    query_norm: NormPlan | None = None
    key_norm: NormPlan | None = None
    rotary: int = 0
    interleaved: bool = False
    repeat_interleave: bool = False
    rotary_argument: str | None = None
    cache_argument: str | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: str | None = None
    norms: tuple[tuple[str, NormPlan], ...] = ()
    parallel: bool = False
    norm_last: bool = False
    flat_norms: bool = False
    residual_scale: float = 1.0
    results: int = 0
    arguments: tuple[str, ...] = ()

    def cos_sin(self, arguments: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """What a call's arguments say of the rotation, as `Attention` takes it."""
        if self.rotary_argument is None:
            return None, None
        cos, sin = arguments[self.rotary_argument]
        return (
            (repeat_interleave(cos), repeat_interleave(sin))
            if self.repeat_interleave
            else (cos, sin)
        )

    def products(self) -> list[ProductPlan]:
        """All products of modules (stacked experts are none)."""
        found = [self.qkv, self.output, *(part for part in (self.up, self.down) if part)]
        if self.experts is not None:
            found += [*self.experts.gate_up, *self.experts.down]
        return found

    def build(self, layer: nn.Module, products: Products) -> DecoderLayer:
        """Makes the fused layer of `layer`; `products` gives the weights."""
        query_norm = self.query_norm.build(layer) if self.query_norm else None
        key_norm = self.key_norm.build(layer) if self.key_norm else None
        attention = Attention(
            products.of(layer, self.qkv),
            products.of(layer, self.output),
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.scale,
            "blocks" if self.qkv.grouped else self.layout,
            query_norm,
            key_norm,
            self.rotary,
            self.interleaved,
            self.window,
            self.softcap,
            layer.get_parameter(self.sinks).detach() if self.sinks else None,
            self.flat_norms,
        )
        norms = {role: norm.build(layer) for role, norm in self.norms}
        return DecoderLayer(
            attention,
            self._build_mlp(layer, products),
            parallel=self.parallel,
            norm_last=self.norm_last,
            residual_scale=self.residual_scale,
            description=self.block_order,
            **norms,
        )

    def _build_mlp(self, layer: nn.Module, products: Products) -> Mlp | RoutedMlp:
        plan = self.experts
        if plan is None:
            assert self.up is not None and self.down is not None
            return Mlp(
                products.of(layer, self.up), products.of(layer, self.down), self.activation_fn
            )
        router = Product(layer.get_parameter(plan.router + ".weight"))
        if plan.stacked is not None:
            gate_up = products.stacked(layer, plan.stacked[0], gated=True)
            down = products.stacked(layer, plan.stacked[1], gated=False)
        else:
            gate_up = [products.of(layer, part) for part in plan.gate_up]
            down = [products.of(layer, part) for part in plan.down]
        return RoutedMlp(router, plan.chosen, plan.normalized, gate_up, down, self.activation_fn)


def repeat_interleave(angles: Tensor) -> Tensor:
    """Cosines or sines of pairs [..., i, i + half] as those of neighbours [..., 2 i, 2 i + 1]."""
    return angles[..., : angles.shape[-1] // 2].repeat_interleave(2, dim=-1)


class Products:
    """Where a fused layer's products come from: here the modules' own weights, copied together."""

    def of(self, layer: nn.Module, plan: ProductPlan) -> Product:
        weights, biases = self.tensors(layer, plan)
        bias = None
        if any(found is not None for found in biases):
            bias = torch.cat(
                [
                    weight.new_zeros(weight.shape[0]) if found is None else found
                    for weight, found in zip(weights, biases, strict=True)
                ]
            )
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        rows = plan.rows(weight.shape[0])
        if rows is not None:
            weight = weight[rows]
            bias = None if bias is None else bias[rows]
        return Product(weight, bias, plan.gated)

    def stacked(self, layer: nn.Module, path: str, gated: bool) -> list[Product]:
        return [Product(weight, None, gated) for weight in layer.get_parameter(path).detach()]

    @staticmethod
    def tensors(layer: nn.Module, plan: ProductPlan) -> tuple[list[Tensor], list[Tensor | None]]:
        """Weights [out, in] and biases of a plan's modules."""
        modules = [layer.get_submodule(path) for path in plan.paths]
        weights = [module.get_parameter("weight").detach() for module in modules]
        if plan.transposed:
            weights = [weight.t() for weight in weights]
        biases = [module._parameters.get("bias") for module in modules]
        return weights, [None if bias is None else bias.detach() for bias in biases]
