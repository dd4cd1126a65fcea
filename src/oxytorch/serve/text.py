"""The text of a sequence as it grows, cut where a stop begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..llm_command.generate import TextPrinter


class GrowingText:
    """Turns tokens into text that is final: characters are complete, and no stop has begun.

    tokenizer: has `decode`.
    stops: strings that end the text and are no part of it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._printer = TextPrinter(tokenizer, self._take)
        self._stops = stops
        self._held = ""
        self._ready = ""
        self.stopped = False

    def put(self, token: int) -> str:
        """The text that a token makes final."""
        self._printer.put([token])
        return self._given()

    def end(self) -> str:
        """The rest, where no stop came."""
        self._printer.end()
        if not self.stopped:
            self._ready += self._held
            self._held = ""
        return self._given()

    def _given(self) -> str:
        ready, self._ready = self._ready, ""
        return ready

    def _take(self, text: str) -> None:
        if self.stopped:
            return
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped = True
            self._ready += text[: min(places)]
            self._held = ""
            return
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._ready += text[: len(text) - held]
        self._held = text[len(text) - held :]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
