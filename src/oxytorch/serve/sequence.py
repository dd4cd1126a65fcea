"""One completion in the making: its prompt, how its tokens are chosen, and where they go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..llm.configured import Processor
from ..llm.sampling import Sampler
from .errors import ApiError
from .text import GrowingText


@dataclass(frozen=True)
class Logprob:
    """A token with its logarithm of probability, and those of the most likely ones."""

    token: int
    value: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Piece:
    """A token was chosen. text: what became final by it, often nothing."""

    text: str
    logprob: Logprob | None = None


@dataclass(frozen=True)
class End:
    """Nothing follows. cached: tokens of the prompt that were not computed again."""

    reason: Literal["stop", "length"] | ApiError
    prompt_tokens: int
    new_tokens: int
    cached: int


Event = Piece | End


@dataclass(eq=False)
class Sequence:
    """A prompt that waits, is read or is gone on from.

    most: the most new tokens.
    ends: tokens that end it.
    top: None for no logarithms of probabilities, else how many of the most likely tokens to tell.
    put: takes events, from the engine's thread.
    deadline: in the time of `time.monotonic`, after which it fails with `late`.
    """

    prompt: list[int]
    most: int
    sampler: Sampler
    ends: frozenset[int]
    text: GrowingText
    put: Callable[[Event], object]
    client: str
    deadline: float
    late: ApiError
    processor: Processor | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top: int | None = None
    cancelled: bool = False
    cached: int = 0
    created: float = 0.0
    new: list[int] = field(default_factory=list)

    def choose(self, logits: Tensor) -> bool:
        """Takes the next token by its logits [1, vocabulary]; whether that was the last one.

        Raises RuntimeError where no logit is finite.
        """
        scores = logits
        if self.processor is not None:
            seen = torch.tensor([self.prompt + self.new], device="cpu")
            scores = self.processor(seen, logits.to(torch.float32, copy=True))
        if self.new and (self.presence_penalty or self.frequency_penalty):
            scores = self._penalized(scores)
        token = int(self.sampler(scores)[0])
        self.new.append(token)
        text = self.text.put(token)
        self.put(Piece(text, None if self.top is None else _logprob(logits, token, self.top)))
        if token in self.ends or self.text.stopped:
            self.end("stop")
        elif len(self.new) >= self.most:
            self.end("length")
        else:
            return False
        return True

    def end(self, reason: Literal["stop", "length"] | ApiError) -> None:
        """Tells that nothing follows."""
        if not isinstance(reason, ApiError):
            rest = self.text.end()
            if rest:
                self.put(Piece(rest))
            if self.text.stopped:
                reason = "stop"
        self.put(End(reason, len(self.prompt), len(self.new), self.cached))

    def _penalized(self, scores: Tensor) -> Tensor:
        """OpenAI's penalties: subtracted for each new token that occurred, and for each time."""
        counts = Counter(self.new)
        tokens = torch.tensor([list(counts)], device="cpu")
        times = torch.tensor([list(counts.values())], dtype=torch.float32, device="cpu")
        taken = self.presence_penalty + self.frequency_penalty * times
        return scores.float().scatter_add(1, tokens, -taken)


def _logprob(logits: Tensor, token: int, top: int) -> Logprob:
    values = torch.log_softmax(logits[0].float(), -1)
    best, places = values.topk(min(top, len(values)))
    found = list(zip(places.tolist(), best.tolist(), strict=True))
    return Logprob(token, values[token].item(), found)
