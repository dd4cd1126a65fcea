"""A model's tokenizer, for requests that come at the same time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from .errors import ApiError


class Tokenizer:
    """Text to tokens and back. inner: a tokenizer of transformers."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._lock = threading.Lock()  # tokenizers change themselves while they encode

    @property
    def has_chat_template(self) -> bool:
        """Whether it says how messages become a prompt."""
        return bool(getattr(self.inner, "chat_template", None))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The tokens of a text; special: with those that the model expects around it."""
        with self._lock:
            found: list[int] = self.inner(text, add_special_tokens=special)["input_ids"]
        return found

    def encode_pair(self, first: str, second: str) -> dict[str, list[int]]:
        """What a model that reads two texts takes."""
        with self._lock:
            found = self.inner(first, second)
        return {name: list(values) for name, values in found.items()}

    def encode_whole(self, text: str) -> dict[str, list[int]]:
        """What a model that reads one text takes."""
        with self._lock:
            found = self.inner(text)
        return {name: list(values) for name, values in found.items()}

    def chat(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None) -> list[int]:
        """The tokens of a prompt in the model's chat template. Raises ApiError where it refuses."""
        if not self.has_chat_template:
            raise ApiError(
                400,
                "this model's tokenizer has no chat template; use /v1/completions, or start the "
                "server with a --tokenizer that has one",
                param="messages",
            )
        import jinja2

        try:
            text = self.inner.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ApiError(
                400, f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return self.encode(text, special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return str(self.inner.decode(list(tokens), skip_special_tokens=False))

    def piece(self, token: int) -> tuple[str, list[int]]:
        """A token as text, and its bytes; a part of a character reads as U+FFFD."""
        text = self.decode([token])
        return text, list(text.encode())
