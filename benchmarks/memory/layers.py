"""Layers of decoders, as models of the Llama and Mixtral families write them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


class Rotary(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        steps = torch.arange(0, width, 2) / width
        self.register_buffer("rates", 10000.0**-steps, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * self.rates.float()
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x: [batch, heads, tokens, width]."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


class LoRALinear(nn.Module):
    """A frozen linear layer and a trained product of low rank beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(F.dropout(x, 0.05, self.training)))


Cache = list[tuple[Tensor, Tensor]]


class Attention(nn.Module):
    """Grouped-query attention; rank: of the adapters on queries and values, 0 for none."""

    def __init__(self, width: int, heads: int, groups: int, rank: int = 0) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        kept = groups * self.size
        self.q = LoRALinear(width, width, rank) if rank else nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kept, bias=False)
        self.v = LoRALinear(width, kept, rank) if rank else nn.Linear(width, kept, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], cache: Cache | None = None, layer: int = 0
    ) -> Tensor:
        batch, tokens, _ = x.shape
        q = rotate(self._split(self.q(x), self.heads), *turn)
        k = rotate(self._split(self.k(x), self.groups), *turn)
        v = self._split(self.v(x), self.groups)
        if cache is not None:
            if len(cache) > layer:
                k = torch.cat([cache[layer][0], k], 2)
                v = torch.cat([cache[layer][1], v], 2)
                cache[layer] = k, v
            else:
                cache.append((k, v))
        k = k.repeat_interleave(self.heads // self.groups, 1)
        v = v.repeat_interleave(self.heads // self.groups, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1)
        return self.o(y.transpose(1, 2).reshape(batch, tokens, -1))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.size).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, width: int, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp
        self.before, self.between = RMSNorm(width), RMSNorm(width)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], cache: Cache | None = None, layer: int = 0
    ) -> Tensor:
        x = x + self.attention(self.before(x), turn, cache, layer)
        return x + self.mlp(self.between(x))


class Decoder(nn.Module):
    """Layers between an embedding and a head.

    Args:
        width: of an embedding.
        vocabulary: how many tokens there are.
        count: how many layers there are.
        make: makes a layer.
        checkpointed: compute the activations of layers again in backward.
    """

    def __init__(
        self,
        width: int,
        vocabulary: int,
        count: int,
        make: Callable[[], Layer],
        checkpointed: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(make() for _ in range(count))
        self.norm, self.rotary = RMSNorm(width), Rotary(64)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        x = self.embedding(tokens)
        past = cache[0][0].shape[2] if cache else 0
        turn = self.rotary(x, torch.arange(past, past + tokens.shape[1], device=tokens.device))
        for index, layer in enumerate(self.layers):
            if self.checkpointed:
                x = checkpoint(layer, x, turn, use_reentrant=False)
            else:
                x = layer(x, turn, cache, index)
        return self.head(self.norm(x))
