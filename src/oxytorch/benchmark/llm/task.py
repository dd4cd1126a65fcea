"""What a contestant of `oxytorch llm bench` is asked to run, and what it hands back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from oxytorch.benchmark.core.contest import Progress, no_progress
from oxytorch.benchmark.llm.shapes import random_model
from oxytorch.llm_command.folder import load_model


@dataclass(frozen=True)
class LlmTask:
    """A model, how it is to be stored, and what is asked of it.

    shape: a name of SHAPES, or empty for the model in `folder`.
    weights: "bf16", "int8", "int4", "nf4", "fp8".
    activation_dtype: None or "int8".
    kv_cache: "bf16" or "int8".
    prompt, tokens: lengths.
    work: a folder for files that a peer's own format needs.
    threads: for everybody.
    """

    shape: str
    folder: str
    weights: str
    activation_dtype: str | None
    kv_cache: str
    group_size: int
    prompt: int
    tokens: int
    threads: int
    work: Path
    progress: Progress = no_progress

    def build(self) -> nn.Module:
        """The model in bfloat16: random weights, the same for everybody, or the folder's."""
        if self.shape:
            return random_model(self.shape)
        return load_model(Path(self.folder))

    def prompt_ids(self, vocabulary: int) -> Tensor:
        """The prompt, int64 [1, prompt]: random tokens, the same for everybody."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(0, vocabulary, (1, self.prompt), generator=generator)


def vocabulary_of(model: Any) -> int:
    """The number of tokens that a model of transformers knows."""
    return int(model.get_input_embeddings().num_embeddings)


@dataclass(frozen=True)
class Turn:
    """One run: seconds from the prompt to its first token, and for each token after it."""

    first: float
    tokens: list[float]


class Contestant(Protocol):
    """A peer that is ready.

    vocabulary: of the model.
    reads: bytes of the weights that one token reads, as stored, for each stretch of memory; empty
        where the peer does not tell.
    operations: of the prompt's products, or 0.
    notes: what a reader should know.
    """

    vocabulary: int
    reads: list[int]
    operations: int
    notes: dict[str, object]

    def turn(self, ids: Tensor, tokens: int) -> Turn:
        """Writes `tokens` tokens after the prompt, always the likeliest."""
        ...

    def logits(self, ids: Tensor) -> Tensor:
        """float32 [vocabulary], after the prompt."""
        ...


@dataclass
class Stepwise:
    """A contestant made of two functions: start with a prompt, and go on with a token.

    start: int64 [1, length] -> the logits' likeliest token.
    step: token -> the next.
    last: the logits of the latest call, float32 [vocabulary].
    """

    vocabulary: int
    start: Callable[[Tensor], int]
    step: Callable[[int], int]
    last: Callable[[], Tensor]
    reads: list[int] = field(default_factory=list)
    operations: int = 0
    notes: dict[str, object] = field(default_factory=dict)
    keep: Any = None
    """What has to stay alive as long as the functions."""

    def turn(self, ids: Tensor, tokens: int) -> Turn:
        times = [time.perf_counter()]
        token = self.start(ids)
        times.append(time.perf_counter())
        for _ in range(tokens - 1):
            token = self.step(token)
            times.append(time.perf_counter())
        gaps = [after - before for before, after in pairwise(times)]
        return Turn(gaps[0], gaps[1:])

    def logits(self, ids: Tensor) -> Tensor:
        self.start(ids)
        return self.last()
