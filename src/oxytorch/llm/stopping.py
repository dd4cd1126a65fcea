"""When a sequence is complete: end tokens, sequences of tokens, and strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .numbers import whole

Stop = str | Sequence[str | Sequence[int]]
"""A string, or a list of strings and of sequences of token ids."""


class Stopping:
    """Watches the new tokens of every sequence of a batch.

    ends: token ids that end a sequence.
    stop: a string, or strings and sequences of token ids, that end it when the new tokens hold
        them.
    tokenizer: turns tokens into text; only strings need it. The token that completes a stop is part
        of the result.

    Raises ValueError for an empty stop, or a string without a tokenizer.
    """

    def __init__(self, ends: Sequence[int], stop: Stop, tokenizer: Any, batch: int) -> None:
        self.ends = frozenset(ends)
        self.strings: list[str] = []
        self.sequences: list[list[int]] = []
        for wanted in [stop] if isinstance(stop, str) or not isinstance(stop, Iterable) else stop:
            if not isinstance(wanted, Sequence):
                raise ValueError(
                    "generate: expected stop to be a string, or a list of strings and of lists of "
                    f"token ids, got {stop!r}"
                )
            if len(wanted) == 0:
                raise ValueError(f"generate: expected stops that are not empty, got {wanted!r}")
            if isinstance(wanted, str):
                self.strings.append(wanted)
            else:
                self.sequences.append([whole("generate", "stop", token, 0) for token in wanted])
        if self.strings and tokenizer is None:
            raise ValueError(
                f"generate: stop {self.strings[0]!r} is text: give the model's tokenizer too, or "
                "stop at token ids"
            )
        self.tokenizer = tokenizer
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.done = [False] * batch
        # A token is at least a byte of text, unless it is special; a cut-off character may stand
        # before them.
        longest = max((len(text.encode()) for text in self.strings), default=0)
        self._tail = longest + 8

    def add(self, tokens: Sequence[int]) -> bool:
        """Note a new token for every sequence; whether all are complete now."""
        for row, token in enumerate(tokens):
            if not self.done[row]:
                self.rows[row].append(token)
                self.done[row] = token in self.ends or self._stops(self.rows[row])
        return all(self.done)

    def _stops(self, row: list[int]) -> bool:
        if any(row[-len(wanted) :] == wanted for wanted in self.sequences):
            return True
        if not self.strings:
            return False
        text = self.tokenizer.decode(row[-self._tail :], skip_special_tokens=False)
        return any(wanted in text for wanted in self.strings)
