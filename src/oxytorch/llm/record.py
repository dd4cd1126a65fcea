"""A whole language model as a record: what a step from token ids to logits takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.panels import PanelWeight
from .cache import CacheSlots, KVCache
from .layer import UNKEPT, DecoderLayer, Norm, Product
from .plan import repeat_interleave
from .standing import Standing


@dataclass(frozen=True)
class Rotation:
    """A call that gave the cosines and sines of some layers: module(x, position_ids, *rest)."""

    module: nn.Module
    rest: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]

    def __call__(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin [batch, n, rotary] in x's dtype for positions int64 [batch, n]."""
        cos, sin = self.module(x, positions, *self.rest, **dict(self.named))
        return cos, sin


@dataclass(frozen=True)
class Angles:
    """A rotary embedding by its numbers: cos(position * frequencies) * factor, and sines.

    frequencies: float32 [rotary].
    """

    frequencies: Tensor
    factor: float

    def __call__(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin [batch, n, rotary] in x's dtype for positions int64 [batch, n]."""
        angles = positions[..., None].float() * self.frequencies
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        return cos.to(x.dtype), sin.to(x.dtype)


@dataclass(eq=False)
class RotaryTable:
    """Cosines and sines of all positions, made as far as needed.

    rotation: makes them: the model's own module, or what a file keeps of it.

    changing: the angles depend on the longest position; then they are computed at each call.
    repeat_interleave: see `plan.LayerPlan`.
    """

    rotation: Rotation | Angles
    dtype: torch.dtype
    changing: bool = field(default=False, metadata=UNKEPT)
    repeat_interleave: bool = field(default=False, metadata=UNKEPT)
    cos: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"), metadata=UNKEPT)
    sin: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"), metadata=UNKEPT)

    def renew(self) -> None:
        """After something was written: make all rows again."""
        self.cos = self.sin = torch.empty(0, device="cpu")

    def rows(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [length, rotary] of positions start .. start + length."""
        end = start + length
        if self.changing:
            cos, sin = self.made(torch.arange(start, end, device="cpu")[None])
            return cos[0], sin[0]
        self.reserve(end)
        return self.cos[start:end], self.sin[start:end]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [batch, n, rotary] of positions int64 [batch, n]."""
        if self.changing:
            return self.made(positions)
        self.reserve(int(positions.max()) + 1)
        return self.cos[positions], self.sin[positions]

    def reserve(self, end: int) -> None:
        """Makes the rows of all positions before `end`."""
        have = self.cos.shape[0]
        if end <= have:
            return
        cos, sin = self.made(torch.arange(max(end, 2 * have, 512), device="cpu")[None])
        # Other threads look at cos to see how far both reach.
        self.sin = sin[0].contiguous()
        self.cos = cos[0].contiguous()

    def made(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [batch, n, rotary] of positions int64 [batch, n], made now."""
        with torch.no_grad():
            cos, sin = self.rotation(torch.empty(0, dtype=self.dtype, device="cpu"), positions)
        return (
            (repeat_interleave(cos), repeat_interleave(sin))
            if self.repeat_interleave
            else (cos, sin)
        )


@dataclass(eq=False)
class FusedModel:
    """A causal language model as fused layers and a few modules.

    embedding: the token embedding.
    layers: the decoder layers.
    tables: the rotary embeddings.
    rotary: for each layer the index of its rotary embedding, or None.
    head: the product that gives logits.
    cache_dtype: dtype of keys and values.
    dtype: dtype of activations.
    norm: the last normalization, or None.
    positions: a table of learned positions and the number of rows before the first one, or None.
    softcap: soft cap of logits, or None.
    divisor: divisor of logits, or None.
    scale: factor of embeddings, or None.
    standing: checks that the model's modules are still those of this record; None for a record
    from a file, which has no others.
    """

    embedding: nn.Module
    layers: list[DecoderLayer]
    tables: list[RotaryTable]
    rotary: list[int | None]
    head: HeadProduct | Product
    cache_dtype: torch.dtype
    dtype: torch.dtype
    norm: Norm | None = None
    positions: tuple[nn.Module, int] | None = None
    softcap: float | None = None
    divisor: float | None = None
    scale: float | None = None
    standing: Standing | None = field(default=None, repr=False, metadata=UNKEPT)

    def cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for `batch` sequences of at most `capacity` tokens."""
        return self._cache(batch, capacity, True)

    def slots(self, count: int, capacity: int) -> CacheSlots:
        """Empty caches for `count` sequences of their own; memory is taken as it is written."""
        return CacheSlots(self._cache(count, capacity, False))

    def _cache(self, batch: int, capacity: int, zeros: bool) -> KVCache:
        kv_heads = [layer.attention.kv_heads for layer in self.layers]
        dims = [layer.attention.head_dim for layer in self.layers]
        count, dtype = len(self.layers), self.cache_dtype
        return KVCache(count, batch, capacity, kv_heads, dims, dtype, zeros)

    def step(
        self,
        tokens: Tensor,
        cache: KVCache,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        last: bool = True,
    ) -> Tensor:
        """Returns logits [batch, n, vocabulary] in the model's dtype; `last`: of the last token.

        tokens: int64 [batch, n], which follow what `cache` holds; its length counts them.
        positions: int64 [batch, n] where they are not those in the cache (padding).
        mask: bool [batch, 1, 1, length] of what is no padding, as long as the cache is after the
            step.

        Raises ValueError if the cache has no room.
        """
        start, length = cache.length, tokens.shape[1]
        if start + length > cache.capacity:
            raise ValueError(
                f"step: expected at most {cache.capacity - start} tokens, the room that is left in "
                f"a cache of {cache.capacity}, got {length}; make the cache larger"
            )
        hidden = self.embedded(tokens, start, positions)
        angles = [
            table.rows(start, length) if positions is None else table.at(positions)
            for table in self.tables
        ]
        masks = self.masks(mask, start, length)
        for index, layer in enumerate(self.layers):
            table = self.rotary[index]
            cos, sin = (None, None) if table is None else angles[table]
            window = layer.attention.window
            hidden = layer.step(
                hidden, cache.layers[index], start, cos, sin, masks[window], None, True
            )
        cache.length = start + length
        return self.logits(hidden[:, -1:] if last else hidden)

    def embedded(self, tokens: Tensor, start: int, positions: Tensor | None = None) -> Tensor:
        """What goes into the first layer, [batch, n, width]."""
        hidden: Tensor = self.embedding(tokens)
        if self.scale is not None:
            hidden = hidden * torch.tensor(self.scale, dtype=hidden.dtype, device="cpu")
        if self.positions is not None:
            table, before = self.positions
            weight = table._parameters["weight"]
            assert weight is not None
            if positions is None:
                rows = weight[start + before : start + before + tokens.shape[1]]
            else:
                rows = weight[positions.clamp(min=-before) + before]
            hidden = hidden + rows
        return hidden

    def masks(
        self, mask: Tensor | None, start: int, length: int
    ) -> dict[int | None, Tensor | None]:
        """The mask for each window among the layers: None, or bool [batch, 1, length, keys]."""
        windows = {layer.attention.window for layer in self.layers}
        if mask is None:
            return dict.fromkeys(windows)
        row = torch.arange(start, start + length, device="cpu")[:, None]
        column = torch.arange(start + length, device="cpu")[None]
        found: dict[int | None, Tensor | None] = {}
        for window in windows:
            seen = column <= row
            if window is not None:
                seen = seen & (column > row - window)
            found[window] = seen & mask
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """The last norm and the head."""
        if self.norm is not None:
            hidden = self.norm(hidden)
        logits = self.head(hidden)
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


@dataclass(eq=False)
class HeadProduct:
    """The head's product over the parameters that its module has at the time of the call."""

    module: nn.Module

    def __call__(self, hidden: Tensor) -> Tensor:
        parameters = self.module._parameters
        weight, bias = parameters["weight"], parameters.get("bias")
        assert weight is not None
        if isinstance(weight, PanelWeight):
            return Product(weight, bias)(hidden)
        result: Tensor = self.module(hidden)
        return result


FUSED = "_oxytorch_fused_model"
"""The attribute that holds the record of the model's whole step."""


def fused_model(model: nn.Module) -> FusedModel | None:
    """Returns the record that `llm.optimize` made of the whole of a model, or None."""
    found = model.__dict__.get(FUSED)
    return found if isinstance(found, FusedModel) else None


def sample_logits(model: FusedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of a prompt and of one more token; tokens: both, int64 [batch, n]."""
    cache = model.cache(tokens.shape[0], tokens.shape[1])
    with torch.no_grad():
        first = model.step(tokens[:, :-1], cache, last=False)
        second = model.step(tokens[:, -1:], cache)
    return first, second
