"""A whole language model as a record: what a step from token ids to logits takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..graph.agreement import LOGITS, difference
from ..ops.panels import PanelWeight
from ..quantization.layers import output_head
from .cache import KVCache
from .forwards import LayerForward
from .layer import UNKEPT, DecoderLayer, Norm, Product
from .matching import norm_of
from .observing import Rotation, Rotations, sample_length, sample_tokens
from .plan import repeat_interleave
from .standing import Standing

_CHANGING = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose angles depend on the length of the prompt."""

_OFFSETS = (0, 2)
"""Rows of a table of positions that come before position 0 (OPT has 2)."""


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
    cos: Tensor = field(default_factory=lambda: torch.empty(0), metadata=UNKEPT)
    sin: Tensor = field(default_factory=lambda: torch.empty(0), metadata=UNKEPT)

    def renew(self) -> None:
        """After something was written: make all rows again."""
        self.cos = self.sin = torch.empty(0)

    def rows(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [length, rotary] of positions start .. start + length."""
        end = start + length
        if self.changing:
            cos, sin = self.made(torch.arange(start, end)[None])
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
        cos, sin = self.made(torch.arange(max(end, 2 * have, 512))[None])
        self.cos, self.sin = cos[0].contiguous(), sin[0].contiguous()

    def made(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [batch, n, rotary] of positions int64 [batch, n], made now."""
        with torch.no_grad():
            cos, sin = self.rotation(torch.empty(0, dtype=self.dtype), positions)
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
        kv_heads = [layer.attention.kv_heads for layer in self.layers]
        dims = [layer.attention.head_dim for layer in self.layers]
        return KVCache(len(self.layers), batch, capacity, kv_heads, dims, self.cache_dtype)

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
        positions: int64 [batch, n] where they are not those in the cache (padding). mask: bool
        [batch, 1, 1, length] of what is no padding, as long as the cache is after the step.
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
                hidden, cache.layers[index], start, cos, sin, masks[window], cache.beams, True
            )
        cache.length = start + length
        return self.logits(hidden[:, -1:] if last else hidden)

    def embedded(self, tokens: Tensor, start: int, positions: Tensor | None = None) -> Tensor:
        """What goes into the first layer, [batch, n, width]."""
        hidden: Tensor = self.embedding(tokens)
        if self.scale is not None:
            hidden = hidden * torch.tensor(self.scale, dtype=hidden.dtype)
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
        row = torch.arange(start, start + length)[:, None]
        column = torch.arange(start + length)[None]
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


def fuse(
    model: Any, forwards: list[LayerForward], rotations: Rotations, config: Any, dtype: torch.dtype
) -> tuple[FusedModel | None, str]:
    """Returns the record of a whole model whose layers are fused, or None and why there is none.

    The record's logits are compared with those of the model's own code, for a prompt and one more
    token.
    """
    tables, rotary, reason = _tables(forwards, rotations, dtype)
    if reason:
        return None, reason
    head = output_head(model)
    assert head is not None
    base = FusedModel(
        model.get_input_embeddings(),
        [forward.layer for forward in forwards],
        tables,
        rotary,
        HeadProduct(head),
        forwards[0].cache_dtype,
        dtype,
    )
    tokens = sample_tokens(model, sample_length(config) + 1, batch=2)
    seen = _Seen(model, forwards, tokens)
    if not _choose_embedding(model, base, config, seen, tokens[:, :-1]):
        return None, "it is not known what goes into its first layer"
    if not _choose_logits(model, base, forwards, config, seen):
        return None, "it is not known what comes behind its last layer"
    gap = difference(seen.logits, sample_logits(base, tokens))
    if not gap <= LOGITS[dtype]:
        return None, f"its logits differ by {gap:.1e} of the largest"
    base.standing = ModelStanding(model, base, [forward.standing for forward in forwards])
    return base, ""


class ModelStanding(Standing):
    """Whether a record still stands for a whole model; layers: the same of its layers."""

    def __init__(self, owner: nn.Module, record: FusedModel, layers: list[Standing]) -> None:
        super().__init__(owner, record, skips_owner=True)
        self.layers = layers

    def holds(self) -> bool:
        # What was written to an embedding reaches a head that has its weight too, and back.
        assert isinstance(self.record.head, HeadProduct)
        forward = self.record.head.module.__dict__.get("forward")
        renew = getattr(forward, "renew", None)
        if renew is not None:
            renew()
        return super().holds()

    def _follows_buffers(self) -> bool:
        return True  # tables of angles are made again, and layers look at theirs

    def _reads_the_weights(self) -> bool:
        return all(layer.holds() for layer in self.layers)  # the rest is read where it is

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "layers": self.layers}


class _Seen:
    """What a model's own code gives for a prompt and one more token.

    first, last: of the prompt, what goes into the first layer and comes out of the last one.
    logits: of both.
    """

    def __init__(self, model: Any, forwards: list[LayerForward], tokens: Tensor) -> None:
        states: list[Tensor] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            states.append(args[0] if args else kwargs["hidden_states"])

        def behind(module: nn.Module, args: Any, output: Any) -> None:
            states.append(output[0] if isinstance(output, tuple) else output)

        layers = forwards[0].module, forwards[-1].module
        with (
            layers[0].register_forward_pre_hook(before, with_kwargs=True),
            layers[1].register_forward_hook(behind),
            torch.no_grad(),
        ):
            prompt = model(input_ids=tokens[:, :-1], use_cache=True)
            token = model(input_ids=tokens[:, -1:], past_key_values=prompt.past_key_values)
        self.first, self.last = states[:2]
        self.logits = prompt.logits, token.logits


def _choose_embedding(
    model: nn.Module, base: FusedModel, config: Any, seen: _Seen, tokens: Tensor
) -> bool:
    width = base.embedding._parameters["weight"].shape[1]  # type: ignore[union-attr]
    if width != seen.first.shape[-1]:
        return False
    multiplier = getattr(config, "embedding_multiplier", None)
    scales = (None, float(getattr(config, "hidden_size", 1)) ** 0.5, multiplier)
    for positions in _positions(model, base.embedding, tokens.shape[1] + 1):
        for scale in scales:
            base.positions, base.scale = positions, scale
            with torch.no_grad():
                found = base.embedded(tokens, 0)
            if found.shape == seen.first.shape and (
                difference(seen.first, found) <= LOGITS[base.dtype]
            ):
                return True
    return False


def _choose_logits(
    model: nn.Module, base: FusedModel, forwards: list[LayerForward], config: Any, seen: _Seen
) -> bool:
    width = seen.last.shape[-1]
    assert isinstance(base.head, HeadProduct)
    head = base.head.module._parameters["weight"]
    assert head is not None
    if width not in head.shape:
        return False  # something between the last layer and the head changes it
    for norm in _last_norms(model, forwards, width):
        for softcap, divisor in _logit_forms(config):
            base.norm, base.softcap, base.divisor = norm, softcap, divisor
            with torch.no_grad():
                found = base.logits(seen.last)
            if difference(seen.logits[0], found) <= LOGITS[base.dtype]:
                return True
    return False


def _tables(
    forwards: list[LayerForward], rotations: Rotations, dtype: torch.dtype
) -> tuple[list[RotaryTable], list[int | None], str]:
    tables: list[RotaryTable] = []
    rotary: list[int | None] = []
    known: dict[int, int] = {}
    for forward in forwards:
        if forward.rotated is None:
            rotary.append(None)
            continue
        found = [i for i, (_, cos) in enumerate(rotations) if cos is forward.rotated]
        if not found:
            return [], [], "it is not known what makes the angles of its rotary embedding"
        if found[0] not in known:
            known[found[0]] = len(tables)
            rotation = rotations[found[0]][0]
            kind = getattr(rotation.module, "rope_type", "")
            kinds = kind.values() if isinstance(kind, dict) else (kind,)
            changing = any(word in str(k) for k in kinds for word in _CHANGING)
            tables.append(RotaryTable(rotation, dtype, changing, forward.plan.repeat_interleave))
        rotary.append(known[found[0]])
    return tables, rotary, ""


def _last_norms(model: nn.Module, forwards: list[LayerForward], width: int) -> list[Norm | None]:
    """Norms of a width beside the list of layers, as candidates for the last one."""
    inside = {part for forward in forwards for part in forward.module.modules()}
    found: list[Norm | None] = []
    for owner in model.modules():
        for name, module in owner.named_children():
            if module not in inside and not [*module.children()]:
                plan = norm_of(owner, name)
                if plan is not None and module.get_parameter("weight").numel() == width:
                    found.append(plan.build(owner))
    return [*found[::-1], None]


def _positions(
    model: nn.Module, embedding: nn.Module, length: int
) -> list[tuple[nn.Module, int] | None]:
    """Tables of learned positions that reach as far as `length`, as candidates."""
    tables = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        and module is not embedding
        and module.embedding_dim == embedding.embedding_dim
    ]
    return [
        None,
        *[
            (table, before)
            for table in tables
            for before in _OFFSETS
            if table.num_embeddings >= length + before
        ],
    ]


def _logit_forms(config: Any) -> list[tuple[float | None, float | None]]:
    """What may be done to logits: (softcap, divisor)."""
    softcap = getattr(config, "final_logit_softcapping", None)
    scaling = getattr(config, "logits_scaling", None)
    factor = getattr(config, "logit_scale", None)
    divisor = scaling if scaling else (1 / factor if factor else None)
    return [(softcap, divisor)] + ([(None, None)] if softcap or divisor else [])


def sample_logits(model: FusedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of a prompt and of one more token; tokens: both, int64 [batch, n]."""
    cache = model.cache(tokens.shape[0], tokens.shape[1])
    with torch.no_grad():
        first = model.step(tokens[:, :-1], cache, last=False)
        second = model.step(tokens[:, -1:], cache)
    return first, second
