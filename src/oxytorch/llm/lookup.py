"""Prompt lookup: guesses the next tokens from what the sequence has said before."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 3
"""Tokens that have to agree; shorter agreements are tried after longer ones."""


class PromptLookup:
    """Finds the latest earlier place that reads like the end of a sequence.

    Most useful where the answer repeats the prompt: summaries, edits, code. The model checks every
    guess, so that wrong ones cost time and never change the answer.
    Source: Saxena, Prompt Lookup Decoding, 2023.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        # What follows each run of tokens: the latest place, for runs of each length.
        self._places: list[dict[tuple[int, ...], int]] = [{} for _ in range(LONGEST)]
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Note the sequence's next token."""
        here = len(self.tokens)
        for length, places in enumerate(self._places, start=1):
            if here >= length:
                places[tuple(self.tokens[here - length :])] = here
        self.tokens.append(token)

    def guess(self, most: int) -> list[int]:
        """Up to `most` tokens that may come next; none where nothing agrees."""
        if most < 1:
            return []
        end = len(self.tokens)
        for length in range(min(LONGEST, end), 0, -1):
            place = self._places[length - 1].get(tuple(self.tokens[end - length :]))
            if place is not None:
                return self.tokens[place : place + most]
        return []
