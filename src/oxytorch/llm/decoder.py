"""What the loop of `generate` asks of a model: logits of tokens, and a cache that it can cut."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..quantization.memory import check_available
from .layer import Attention
from .model import FusedModel
from .optimize import fused_model
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


class Decoder(Protocol):
    """A model that can start a run.

    vocabulary: number of tokens that it knows. positions: tokens that it was made for, or None.
    """

    vocabulary: int
    positions: int | None

    def begin(self, batch: int, capacity: int, padding: Tensor | None) -> Run:
        """A run of `batch` sequences of up to `capacity` tokens.

        padding: int64 [batch], the number of tokens at the start of each that are not to be seen.
        """
        ...


def decoder_of(model: nn.Module) -> Decoder:
    """The decoder of a Hugging Face causal language model.

    What `llm.optimize` knows as a whole runs as its record, anything else through its own forward.
    Raises TypeError for another kind of model.
    """
    plain = PlainDecoder(model)
    fused = fused_model(model)
    return plain if fused is None else FusedDecoder(fused, plain)


class FusedDecoder:
    """A model that `llm.optimize` recognized as a whole, over a cache of a fixed capacity."""

    def __init__(self, model: FusedModel, plain: PlainDecoder) -> None:
        self.model = model
        self.vocabulary = plain.vocabulary
        self.positions = plain.positions

    def begin(self, batch: int, capacity: int, padding: Tensor | None) -> Run:
        check_available(
            "generate",
            sum(
                _cache_bytes(layer.attention, self.model.cache_dtype) for layer in self.model.layers
            )
            * batch
            * capacity,
            f"the keys and values of {batch} x {capacity} tokens",
        )
        return _FusedRun(self.model, batch, capacity, padding)


def _cache_bytes(attention: Attention, dtype: torch.dtype) -> int:
    """Bytes of a layer's keys and values for one token; int8 has a float32 scale for each head."""
    scale = 4 if dtype == torch.int8 else 0
    return 2 * attention.kv_heads * (attention.head_dim * dtype.itemsize + scale)


class _FusedRun:
    def __init__(
        self, model: FusedModel, batch: int, capacity: int, padding: Tensor | None
    ) -> None:
        self.model = model
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
            places = torch.arange(end) - self.padding[:, None]
            mask = (places >= 0)[:, None, None]
            positions = places[:, self.length :].clamp(min=0)
        return self.model.step(tokens, self._cache, positions=positions, mask=mask, last=not every)

    def cut(self, length: int) -> None:
        self._cache.crop(length)


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
                f"{type(model).__name__}"
            )
        self.model = model
        self.vocabulary = int(embeddings().num_embeddings)
        self.positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        accepted = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in accepted
        self.takes_keep = "logits_to_keep" in accepted

    def begin(self, batch: int, capacity: int, padding: Tensor | None) -> Run:
        return _PlainRun(self, padding)


class _PlainRun:
    def __init__(self, decoder: PlainDecoder, padding: Tensor | None) -> None:
        from transformers import DynamicCache

        self.decoder = decoder
        self.padding = padding
        self.length = 0
        self._cache: Any = DynamicCache()

    def step(self, tokens: Tensor, every: bool) -> Tensor:
        end = self.length + tokens.shape[1]
        options: dict[str, Any] = {}
        if self.padding is not None:
            places = torch.arange(end) - self.padding[:, None]
            options["attention_mask"] = (places >= 0).long()
            if self.decoder.takes_positions:
                options["position_ids"] = places[:, self.length :].clamp(min=0)
        if self.decoder.takes_keep:
            options["logits_to_keep"] = 0 if every else 1
        output = self.decoder.model(
            input_ids=tokens, past_key_values=self._cache, use_cache=True, **options
        )
        self.length = end
        logits: Tensor = output.logits
        return logits if every else logits[:, -1:]

    def cut(self, length: int) -> None:
        self._cache.crop(length - self.length)  # a negative number: tokens to remove
        self.length = length
