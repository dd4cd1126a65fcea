"""A language model from a file: what `oxytorch.load` returns for one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .record import FusedModel


@dataclass(frozen=True)
class Settings:
    """What a file keeps of a model's generation_config.

    eos_token_id: tokens that end a sequence.
    pad_token_id: fills finished ones.
    stop_strings: end a sequence too.
    repetition_penalty: see `generate`.
    """

    eos_token_id: list[int]
    pad_token_id: int | None = None
    stop_strings: list[str] | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A language model that generates without its Python code and without transformers.

    `oxytorch.llm.generate`, `stream`, `perplexity` and `token_losses` take it too, and
    `oxytorch.save` writes it again. Copies, and calls from several threads, work.

    record: its weights and what a step does with them.
    positions: tokens that it was made for, or None where its angles are made for longer texts.
    """

    record: FusedModel
    positions: int | None
    generation_config: Settings

    @property
    def vocabulary(self) -> int:
        """Number of tokens that it knows."""
        weight = self.record.embedding.get_parameter("weight")
        return weight.shape[0]

    def generate(self, input_ids: Tensor, *, max_new_tokens: int, **options: Any) -> Tensor:
        """Return the prompts int64 [batch, length] followed by new tokens.

        options: those of `oxytorch.llm.generate`, whose errors these are.
        """
        from .generation import generate

        return generate(self, input_ids, max_new_tokens=max_new_tokens, **options)

    def stream(self, input_ids: Tensor, *, max_new_tokens: int, **options: Any) -> Iterator[Tensor]:
        """Yield the new tokens of `generate`, int64 [batch], one position at a time."""
        from .generation import stream

        return stream(self, input_ids, max_new_tokens=max_new_tokens, **options)

    def __repr__(self) -> str:
        record = self.record
        dtype = str(record.dtype).removeprefix("torch.")
        return f"LanguageModel({len(record.layers)} layers, {self.vocabulary} tokens, {dtype})"
