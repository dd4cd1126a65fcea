"""The places in which sequences are decoded: keys and values, and steps of one or of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..llm.cache import KVCache
from ..llm.decoder import Decoder, FusedDecoder, Run, decoder_of
from ..llm.joint_steps import MOST_DIGIT_ROWS, can_join, joint_step, most_alike_rows
from ..llm.language_model import LanguageModel
from ..llm.record import FusedModel
from ..llm.single_steps import SingleSteps

LEAST_READ = MOST_DIGIT_ROWS + 1
"""Tokens of a prompt that are read in one piece at least, where it has as many: products of few
rows may round in another way than those of many."""


@dataclass(eq=False)
class Lane:
    """tokens: those that the model has seen.
    used: when it was taken last, by a counter.
    slot: its number among all of the model's.
    """

    tokens: list[int] = field(default_factory=list)
    is_free: bool = True
    used: int = 0
    slot: int = 0
    state: Any = None


class Lanes(Protocol):
    """A model with places for several sequences.

    batched: sequences step together, and read the weights once.
    in_parts: prompts may be read in parts.
    """

    batched: bool
    in_parts: bool

    def begin(self, prompt: Sequence[int]) -> Lane:
        """Takes a free place; its `tokens` are the part of the prompt that is known already."""
        ...

    def read(self, lane: Lane, tokens: Sequence[int]) -> Tensor:
        """Logits [1, vocabulary] after more tokens of a prompt."""
        ...

    def step(self, lanes: Sequence[Lane], tokens: Sequence[int]) -> Tensor:
        """Logits [lanes, vocabulary] after one more token of each."""
        ...

    def end(self, lane: Lane) -> None:
        """Frees the place."""
        ...


def lanes_of(
    model: nn.Module | LanguageModel, count: int, context: int, rows: int | None = None
) -> Lanes:
    """Places for `count` sequences of up to `context` tokens.

    rows: sequences of one step at most; None: as many as `most_alike_rows` says.
    """
    decoder = decoder_of(model)
    if isinstance(decoder, FusedDecoder) and can_join(decoder.model):
        return FusedLanes(decoder.model, count, context, rows)
    return PlainLanes(decoder, count, context)


class FusedLanes:
    """Of a model that is known as a whole, with a row of its caches for each place.

    What a place has seen stays there until it is taken again: a prompt that begins with the same
    tokens copies their keys and values, also of a sequence that still grows.
    """

    batched = True
    in_parts = True

    def __init__(self, model: FusedModel, count: int, context: int, rows: int | None) -> None:
        self.model = model
        self.rows = most_alike_rows(model) if rows is None else rows
        self._caches = model.slots(count, context)
        self._single = [SingleSteps(model, cache, None) for cache in self._caches.slots]
        self._lanes = [Lane(slot=slot) for slot in range(count)]
        self._clock = 0

    def begin(self, prompt: Sequence[int]) -> Lane:
        most = len(prompt) - min(LEAST_READ, len(prompt))
        shared = {lane: _common(lane.tokens, prompt, most) for lane in self._lanes}
        source = max(self._lanes, key=lambda lane: (shared[lane], lane.is_free))
        count = shared[source]
        free = [lane for lane in self._lanes if lane.is_free]
        lane = min(free, key=lambda lane: lane.used)
        if source.is_free and (source is lane or 2 * count >= len(source.tokens)):
            lane = source
        elif count:
            self._copy(source, lane, count)
        self._clock += 1
        lane.used, lane.is_free = self._clock, False
        lane.tokens = list(prompt[:count])
        self._cache(lane).crop(count)
        return lane

    def read(self, lane: Lane, tokens: Sequence[int]) -> Tensor:
        logits = self.model.step(torch.tensor([tokens], device="cpu"), self._cache(lane))
        lane.tokens += tokens
        return logits[:, -1]

    def step(self, lanes: Sequence[Lane], tokens: Sequence[int]) -> Tensor:
        columns = torch.tensor(tokens, device="cpu")[:, None]
        # One sequence alone runs as `llm.generate` runs it, without Python between its operators.
        logits = self._single[lanes[0].slot](columns) if len(lanes) == 1 else None
        if logits is None:
            logits = self._in_groups(columns, [lane.slot for lane in lanes])
        for lane, token in zip(lanes, tokens, strict=True):
            lane.tokens.append(token)
        return logits[:, -1]

    def end(self, lane: Lane) -> None:
        lane.is_free = True

    def _in_groups(self, tokens: Tensor, slots: Sequence[int]) -> Tensor:
        """Logits of groups that are as large as rounding allows, and of about the same size."""
        groups = -(-len(slots) // self.rows)
        ends = [len(slots) * number // groups for number in range(groups + 1)]
        parts = [
            joint_step(self.model, tokens[start:end], self._caches, slots[start:end])
            for start, end in pairwise(ends)
        ]
        return torch.cat(parts)

    def _cache(self, lane: Lane) -> KVCache:
        return self._caches.slots[lane.slot]

    def _copy(self, source: Lane, lane: Lane, count: int) -> None:
        _copy_keys(self._cache(source), self._cache(lane), count)


def _copy_keys(source: KVCache, target: KVCache, count: int) -> None:
    """Copies keys and values of the first `count` tokens, which `target` then counts."""
    for mine, theirs in zip(source.layers, target.layers, strict=True):
        for old, new in zip(mine.tensors(), theirs.tensors(), strict=True):
            new[:, :, :count] = old[:, :, :count]
    target.length = count


def _common(seen: Sequence[int], prompt: Sequence[int], most: int) -> int:
    """How many tokens both begin with, at most `most`."""
    most = min(most, len(seen))
    if seen[:most] == list(prompt[:most]):
        return most
    return next(place for place in range(most) if seen[place] != prompt[place])


class PlainLanes:
    """Of any other language model: sequences take turns, one step of the model for each."""

    batched = False
    in_parts = False

    def __init__(self, decoder: Decoder, count: int, context: int) -> None:
        self.decoder = decoder
        self.context = context
        self._free = count

    def begin(self, prompt: Sequence[int]) -> Lane:
        if self._free == 0:
            raise IndexError("no place is free")
        self._free -= 1
        return Lane(is_free=False, state=self.decoder.begin(1, self.context, None))

    def read(self, lane: Lane, tokens: Sequence[int]) -> Tensor:
        run: Run = lane.state
        logits = run.step(torch.tensor([tokens], device="cpu"), every=False)
        lane.tokens += tokens
        return logits[:, -1]

    def step(self, lanes: Sequence[Lane], tokens: Sequence[int]) -> Tensor:
        each = [self.read(lane, [token]) for lane, token in zip(lanes, tokens, strict=True)]
        return torch.cat(each)

    def end(self, lane: Lane) -> None:
        self._free += 1
        lane.state, lane.is_free = None, True
