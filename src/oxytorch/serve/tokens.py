"""A model's tokenizer, for requests that come at the same time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from ..llm_command.folder import chat_prompt
from .errors import ApiError
from .logs import log

CHARACTERS = 64
"""A text of more characters for each token that the model reads is refused before it is turned into
tokens, which takes seconds for megabytes. Tokens of text have 2 to 5 characters."""


class Tokenizer:
    """Text to tokens and back.

    inner: a tokenizer of transformers.
    longest: most tokens of a text that the model reads.
    """

    def __init__(self, inner: Any, longest: int) -> None:
        self.inner = inner
        self.longest = longest
        self._lock = threading.Lock()  # tokenizers change themselves while they encode

    @property
    def has_chat_template(self) -> bool:
        """Whether it says how messages become a prompt."""
        return bool(getattr(self.inner, "chat_template", None))

    def encode(self, text: str, field: str, special: bool = True) -> list[int]:
        """The tokens of a text; special: with those that the model expects around it.

        field: of the request. Raises ApiError for a text that is far too long, as all of these do.
        """
        self._check_length(text, field)
        with self._lock:
            found: list[int] = self.inner(text, add_special_tokens=special)["input_ids"]
        return found

    def encode_pair(self, first: str, second: str) -> dict[str, list[int]]:
        """What a model that reads two texts takes."""
        self._check_length(first, "query")
        self._check_length(second, "documents")
        with self._lock:
            found = self.inner(first, second)
        return {name: list(values) for name, values in found.items()}

    def encode_whole(self, text: str) -> dict[str, list[int]]:
        """What a model that reads one text takes."""
        self._check_length(text, "input")
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
        try:
            text = chat_prompt(self.inner, messages, tools)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from error
        return self.encode(text, "messages", special=False)

    def check_template(self) -> None:
        """Tries the chat template, where there is one, with a single message.

        Raises ValueError for what is no template. Where it refuses the message, the log says so.
        """
        if not self.has_chat_template:
            return
        import jinja2

        try:
            chat_prompt(self.inner, [{"role": "user", "content": "Hello"}])
        except ValueError as error:
            if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
                raise ValueError(
                    f"{error}; mend or remove it (chat_template.jinja, or chat_template in "
                    "tokenizer_config.json)"
                ) from error
            log.warning("a chat of one message fails", extra={"fields": {"error": str(error)}})

    def _check_length(self, text: str, field: str) -> None:
        if len(text) > CHARACTERS * self.longest:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.longest} tokens, and {field} has a "
                f"text of {len(text)} characters; shorten it",
                param=field,
                code="context_length_exceeded",
            )

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return str(self.inner.decode(list(tokens), skip_special_tokens=False))

    def piece(self, token: int) -> tuple[str, list[int]]:
        """A token as text, and its bytes; a part of a character reads as U+FFFD."""
        text = self.decode([token])
        return text, list(text.encode())
