"""What the loop of `generate` asks of a model: logits of tokens, and a cache that it can cut."""

from __future__ import annotations

from itertools import starmap
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..graph.agreement import TOLERANCE, difference
from ..rewriting.memory import check_available
from .cache import KVCache
from .language_model import LanguageModel
from .layer import Attention
from .record import FusedModel, fused_model
from .samples import sample_tokens
from .single_steps import SingleSteps


class Run(Protocol):
    """One generation: a model with the keys and values of the tokens that it has seen.

    length: tokens seen so far, padding included.
    """

    @property
    def length(self) -> int: ...

    def step(self, tokens: Tensor, every: bool) -> Tensor:
        """Logits after tokens [batch, n] int64, which are added to the cache.

        Returns [batch, n, vocabulary], or [batch, 1, vocabulary] of the last one without `every`.
        """
        ...

    def cut(self, length: int) -> None:
        """Forget what came after the first `length` tokens."""
        ...

    def followed(self) -> Run:
        """The run that goes on after others may have changed the model."""
        ...


class Decoder(Protocol):
    """A model that can start a run.

    vocabulary: number of tokens that it knows.
    positions: tokens that it was made for, or None.
    keeps_keys: what a run has seen are keys and values of each token: it can be cut, and a later
        step may take several tokens at the cost of one.
    """

    vocabulary: int
    positions: int | None
    keeps_keys: bool

    def reads_in_parts(self) -> bool:
        """Whether a text has the same scores where it is read part by part."""
        ...

    def begin(
        self, batch: int, capacity: int, padding: Tensor | None, numbered: bool = True
    ) -> Run:
        """A run of `batch` sequences of up to `capacity` tokens.

        padding: int64 [batch], the number of tokens at the start of each that are not to be seen.
        numbered: give the model's own forward the tokens' positions, as `model.generate` does.
        """
        ...


def decoder_of(model: nn.Module | LanguageModel) -> Decoder:
    """The decoder of a Hugging Face causal language model, or of one from a file.

    What `llm.optimize` knows as a whole runs as its record while that stands, anything else through
    its own forward.
    Raises TypeError for another kind of model.
    """
    if isinstance(model, LanguageModel):
        return FusedDecoder(model.record, model.vocabulary, model.positions)
    plain = PlainDecoder(model)
    fused = fused_model(model)
    if fused is None or fused.standing is None:
        return plain
    with torch.no_grad():  # as the model runs then
        stands = fused.standing.allows()
    return FusedDecoder(fused, plain.vocabulary, plain.positions, plain) if stands else plain


class FusedDecoder:
    """A model that `llm.optimize` recognized as a whole, over a cache of a fixed capacity.

    plain: its own code, for the time after a change; None for a model from a file.
    """

    keeps_keys = True

    def __init__(
        self,
        model: FusedModel,
        vocabulary: int,
        positions: int | None,
        plain: PlainDecoder | None = None,
    ) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.positions = positions
        self.plain = plain

    def reads_in_parts(self) -> bool:
        return True

    def begin(
        self, batch: int, capacity: int, padding: Tensor | None, numbered: bool = True
    ) -> Run:
        check_available(
            "generate",
            sum(
                _cache_bytes(layer.attention, self.model.cache_dtype) for layer in self.model.layers
            )
            * batch
            * capacity,
            f"the keys and values of {batch} x {capacity} tokens",
        )
        return _FusedRun(self.model, self.plain, batch, capacity, padding)


def _cache_bytes(attention: Attention, dtype: torch.dtype) -> int:
    """Bytes of a layer's keys and values for one token; int8 has a float32 scale for each head."""
    scale = 4 if dtype == torch.int8 else 0
    return 2 * attention.kv_heads * (attention.head_dim * dtype.itemsize + scale)


class _FusedRun:
    def __init__(
        self,
        model: FusedModel,
        plain: PlainDecoder | None,
        batch: int,
        capacity: int,
        padding: Tensor | None,
    ) -> None:
        self.model = model
        self.plain = plain
        self.padding = padding
        self._cache = model.cache(batch, capacity)
        self._single = SingleSteps(model, self._cache, padding)

    @property
    def length(self) -> int:
        return self._cache.length

    def step(self, tokens: Tensor, every: bool) -> Tensor:
        if tokens.shape[1] == 1:
            logits = self._single(tokens)
            if logits is not None:
                return logits
        positions = mask = None
        if self.padding is not None:
            end = self.length + tokens.shape[1]
            places = torch.arange(end, device="cpu") - self.padding[:, None]
            mask = (places >= 0)[:, None, None]
            positions = places[:, self.length :].clamp(min=0)
        return self.model.step(tokens, self._cache, positions=positions, mask=mask, last=not every)

    def cut(self, length: int) -> None:
        self._cache.crop(length)

    def followed(self) -> Run:
        if self.model.standing is None or self.plain is None:
            return self
        renewals = self.model.standing.renewals
        if not self.model.standing.allows():
            return _KeysRun(self.plain, self.padding, self._cache, self.model.dtype)
        if renewals != self.model.standing.renewals:
            self._single = SingleSteps(self.model, self._cache, self.padding)
        return self


class PlainDecoder:
    """Any causal language model of `transformers`, through its own forward and cache."""

    def __init__(self, model: nn.Module) -> None:
        config: Any = getattr(model, "config", None)
        embeddings = getattr(model, "get_input_embeddings", None)
        if config is None or embeddings is None or not hasattr(model, "generation_config"):
            raise TypeError(
                f"generate: expected a causal language model of transformers, got a "
                f"{type(model).__name__}"
            )
        if getattr(config, "is_encoder_decoder", False):
            raise TypeError(
                f"generate: expected a model that only decodes, got the encoder and decoder "
                f"{type(model).__name__}; use its own generate"
            )
        try:
            embedding = embeddings()
        except (AttributeError, NotImplementedError) as error:  # of what stands in for a part of it
            raise TypeError(
                f"generate: expected get_input_embeddings() to give the embedding of the "
                f"{type(model).__name__}, got the error {error!r}; use its own generate"
            ) from error
        vocabulary = getattr(embedding, "num_embeddings", None)
        if vocabulary is None:
            raise TypeError(
                f"generate: expected a model that reads one token at a time, got the "
                f"{type(model).__name__}, whose input is embedded by a "
                f"{type(embedding).__name__}; use its own generate"
            )
        self.model = model
        self.vocabulary = int(vocabulary)
        self.positions = _positions(config.get_text_config())
        from .transformers_cache import caches_keys, forward_arguments, keys_argument

        self.accepted = forward_arguments(model)
        takes_cache = self.accepted & {"use_cache", "kwargs"}
        self.options = {"use_cache": True} if takes_cache else {}
        self.keeps_keys = caches_keys(model)
        self.keys_argument = keys_argument(model) or ""
        self.numbered = True

    def reads_in_parts(self) -> bool:
        if not self.keeps_keys:
            return False
        tokens = sample_tokens(self.model, _TRIAL)
        whole = self.call(tokens, 0, None, True).logits
        run = _KeysRun(self, None)
        parts = [run.step(tokens[:, part], True) for part in (slice(0, -1), slice(-1, None))]
        return _agree(self, tokens, whole, torch.cat(parts, 1))

    def begin(
        self, batch: int, capacity: int, padding: Tensor | None, numbered: bool = True
    ) -> Run:
        self.numbered = numbered
        if self.keeps_keys:
            return _KeysRun(self, padding)
        return _StateRun(self, batch, padding)

    def call(
        self, tokens: Tensor, before: int, padding: Tensor | None, every: bool, **cache: Any
    ) -> Any:
        """The output of the model's forward for tokens that follow `before` others."""
        from .transformers_cache import keeps_tokens

        options = {**self.options, **cache}
        places = torch.arange(before + tokens.shape[1], device="cpu")[None]
        if padding is not None:
            places = places - padding[:, None]
            if all(starmap(keeps_tokens, cache.items())):  # others see no earlier token again
                options["attention_mask"] = (places >= 0).long()
        # Some caches of models' own do not count the tokens that they have seen.
        numbered = self.numbered or padding is not None or (before > 0 and not self.keeps_keys)
        if numbered and "position_ids" in self.accepted:
            options["position_ids"] = places[:, before:].clamp(min=0)
        if "logits_to_keep" in self.accepted:
            options["logits_to_keep"] = 0 if every else 1
        return self.model(input_ids=tokens, **options)


def _positions(config: Any) -> int | None:
    """How many tokens a model was made for; None where its angles are made for longer texts."""
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    rotary = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    kinds: set[Any] = set()
    while rotary:
        found = rotary.pop()
        if isinstance(found, dict):
            kinds.update(found.get(name) for name in ("rope_type", "type"))
            rotary += found.values()
    return None if kinds - {None, "default"} else positions


class _KeysRun:
    """Over a cache of keys and values only; cache: of a fused run that this one goes on from."""

    def __init__(
        self,
        decoder: PlainDecoder,
        padding: Tensor | None,
        cache: KVCache | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        from transformers import DynamicCache

        self.decoder = decoder
        self.padding = padding
        self.length = 0
        # Without the model's configuration no layer forgets what left a window: it can be cut.
        self._cache: Any = DynamicCache()
        if cache is not None and cache.length:
            self.length = cache.length
            for index, layer in enumerate(cache.layers):
                self._cache.update(*layer.plain(cache.length, None, dtype), index)

    def step(self, tokens: Tensor, every: bool) -> Tensor:
        output = self.decoder.call(
            tokens, self.length, self.padding, every, **{self.decoder.keys_argument: self._cache}
        )
        self.length += tokens.shape[1]
        logits: Tensor = output.logits
        return logits if every else logits[:, -1:]

    def cut(self, length: int) -> None:
        self._cache.crop(length - self.length)  # a negative number: tokens to remove
        self.length = length

    def followed(self) -> Run:
        return self


_TRIAL = 4
"""Tokens that a state is tried with."""

_TRIED: WeakKeyDictionary[nn.Module, dict[bool, str | None]] = WeakKeyDictionary()
"""The states that models go on from, for a single sequence and for several."""


def _state_name(decoder: PlainDecoder, several: bool) -> str | None:
    """What a model calls its state, or None where going on from it gives other scores.

    several: for more than one sequence. Each plan is tried on numbers before it is used. Raises
    TypeError where a token changes the scores of those before it.
    """
    from .transformers_cache import state_of

    known = _TRIED.setdefault(decoder.model, {})
    if several in known:
        return known[several]
    tokens = sample_tokens(decoder.model, _TRIAL, batch=2 if several else 1)
    before = _TRIAL - 1
    whole = decoder.call(tokens, 0, None, True).logits
    first = decoder.call(tokens[:, :before], 0, None, True)
    if not _agree(decoder, tokens, whole, first.logits):
        raise TypeError(
            f"generate: expected a model that scores tokens by earlier ones, but "
            f"{type(decoder.model).__name__} reads later ones too; use its own generate"
        )
    known[several] = None
    for name, state in state_of(decoder.model, first).items():
        again = decoder.call(tokens[:, before:], before, None, True, **{name: state}).logits
        if _agree(decoder, tokens, whole, again):
            known[several] = name
    return known[several]


_ROUNDINGS = 2
"""How far scores may be apart, in times of what another rounding of the embeddings changes."""


def _agree(decoder: PlainDecoder, tokens: Tensor, whole: Tensor, found: Tensor) -> bool:
    """Whether scores of the first or of the last of some tokens are `whole`, those of all of them,
    but for rounding."""
    count = found.shape[1]
    places = slice(0, count) if count == tokens.shape[1] - 1 else slice(-count, None)
    gap = difference(whole[:, places], found)
    embeddings: Any = decoder.model.get_input_embeddings()  # type: ignore[operator]
    dtype = embeddings.weight.dtype
    if gap <= TOLERANCE.get(dtype, max(TOLERANCE.values())):
        return True
    generator = torch.Generator().manual_seed(0)

    def round_otherwise(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        noise = torch.rand(output.shape, generator=generator, device="cpu") * 2 - 1
        return (output.float() * (1 + torch.finfo(dtype).eps * noise)).to(output.dtype)

    handle = embeddings.register_forward_hook(round_otherwise)
    try:
        others = [decoder.call(tokens, 0, None, True).logits for _ in range(2)]
    finally:
        handle.remove()
    return gap <= _ROUNDINGS * max(difference(whole[:, places], own[:, places]) for own in others)


class _StateRun:
    """Over whatever state the model's own code makes, returns and takes again.

    Behind the prompt it gets its tokens one by one: that is what such code is written for. A model
    that cannot go on from a state reads all tokens again in each step.
    """

    def __init__(self, decoder: PlainDecoder, batch: int, padding: Tensor | None) -> None:
        self.decoder = decoder
        self.padding = padding
        self._name = _state_name(decoder, batch > 1)
        self._state: Any = None
        self._tokens = torch.empty(batch, 0, dtype=torch.int64, device="cpu")

    @property
    def length(self) -> int:
        return self._tokens.shape[1]

    def step(self, tokens: Tensor, every: bool) -> Tensor:
        before = self.length
        self._tokens = torch.cat([self._tokens, tokens], 1)
        if self._name is None:
            output = self.decoder.call(self._tokens, 0, self.padding, every or before > 0)
            logits: Tensor = output.logits[:, -tokens.shape[1] :]
        elif before == 0:
            logits = self._call(tokens, 0, every)
        else:
            parts = enumerate(torch.split(tokens, 1, dim=1), start=before)
            logits = torch.cat([self._call(part, place, True) for place, part in parts], 1)
        return logits if every else logits[:, -1:]

    def _call(self, tokens: Tensor, before: int, every: bool) -> Tensor:
        assert self._name is not None
        cache = {} if self._state is None else {self._name: self._state}
        output = self.decoder.call(tokens, before, self.padding, every, **cache)
        self._state = getattr(output, self._name)
        logits: Tensor = output.logits
        return logits

    def cut(self, length: int) -> None:
        raise RuntimeError(f"a {type(self.decoder.model).__name__} cannot forget tokens")

    def followed(self) -> Run:
        return self
