"""A language model behind HTTP: from a request to sequences, from their events to a response."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import torch
from torch import nn

from ..llm.configured import processor_of, setting
from ..llm.generation import end_tokens
from ..llm.language_model import LanguageModel
from ..llm.sampling import Sampler
from .engine import Engine
from .errors import ApiError, timed_out
from .requests import Chat, Completion, Sampling
from .sequence import End, Event, Sequence
from .text import GrowingText
from .tokens import Tokenizer

MOST_STOPS = 16
"""Each is looked for after every token, by the thread that computes the tokens of all."""


@dataclass(frozen=True)
class Limits:
    """What a request may ask for.

    context: tokens of a prompt and its completion.
    new: most new tokens of a completion.
    choices: most completions of a request.
    seconds: from its arrival to its end.
    """

    context: int
    new: int
    choices: int
    seconds: float


@dataclass(frozen=True)
class _Length:
    """The most new tokens that a request asks for, or None, and the field that says so."""

    most: int | None
    name: str


@dataclass(eq=False)
class Job:
    """The completions of one request in the making.

    id, created: as the response tells them.
    events: pairs of a completion's number and what happened to it, in order.
    answers: how many completions.
    choices: completions of each prompt.
    """

    id: str
    created: int
    answers: int
    choices: int
    sequences: list[Sequence] = field(default_factory=list)
    events: asyncio.Queue[tuple[int, Event]] = field(default_factory=asyncio.Queue)

    async def happened(self) -> AsyncIterator[tuple[int, Event]]:
        """All events until all completions have ended. Raises ApiError where one failed."""
        left = self.answers
        while left:
            number, event = await self.events.get()
            if isinstance(event, End):
                if isinstance(event.reason, ApiError):
                    raise event.reason
                left -= 1
            yield number, event

    def cancel(self) -> None:
        """Frees the places of completions that nobody waits for; others have ended already."""
        for sequence in self.sequences:
            sequence.cancelled = True


@dataclass(eq=False)
class Language:
    """What requests for a language model go through. vocabulary: tokens that the model knows."""

    model: nn.Module | LanguageModel
    vocabulary: int
    tokenizer: Tokenizer
    engine: Engine
    limits: Limits
    _ends: frozenset[int] = field(init=False)
    _stops: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._ends = frozenset(end_tokens(self.model, None))
        strings = setting(self.model, "stop_strings") or []
        self._stops = [strings] if isinstance(strings, str) else list(strings)

    async def complete(self, request: Completion, client: str) -> Job:
        """Starts the completions; completion i belongs to prompt i // n."""
        prompts = await asyncio.to_thread(self._prompts, request)
        length = _Length(request.max_tokens, "max_tokens")
        return self._start(request, prompts, length, request.logprobs, client, "cmpl")

    async def chat(self, request: Chat, client: str) -> Job:
        """Starts the completions of a chat."""
        if request.top_logprobs is not None and not request.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        self._check_choices(1, request.n)
        tools = None if request.tool_choice == "none" else request.tools
        messages = [_plain(message) for message in request.messages]
        prompt = await asyncio.to_thread(self.tokenizer.chat, messages, tools)
        self._check_tokens(prompt, "messages")
        length = _Length(request.max_tokens, "max_tokens")
        if request.max_completion_tokens:
            length = _Length(request.max_completion_tokens, "max_completion_tokens")
        top = (request.top_logprobs or 0) if request.logprobs else None
        return self._start(request, [prompt], length, top, client, "chatcmpl")

    def _prompts(self, request: Completion) -> list[list[int]]:
        given = separate(request.prompt)
        if not given:
            raise ApiError(400, "expected a prompt, got an empty list", param="prompt")
        self._check_choices(len(given), request.n)
        prompts = [
            self.tokenizer.encode(each, "prompt") if isinstance(each, str) else each
            for each in given
        ]
        for prompt in prompts:
            self._check_tokens(prompt, "prompt")
        return prompts

    def _check_choices(self, prompts: int, each: int) -> None:
        if prompts * each > self.limits.choices:
            raise ApiError(
                400,
                f"expected at most {self.limits.choices} completions of a request, got "
                f"{prompts} prompts times n={each}",
                param="n",
            )

    def _check_tokens(self, prompt: list[int], name: str) -> None:
        if not prompt:
            raise ApiError(
                400, f"{name} has no tokens; give some text to continue from", param=name
            )
        wrong = [token for token in prompt if not 0 <= token < self.vocabulary]
        if wrong:
            raise ApiError(
                400,
                f"{name} has the token {wrong[0]}, the model knows 0 to {self.vocabulary - 1}",
                param=name,
            )

    def _start(
        self,
        request: Sampling,
        prompts: list[list[int]],
        length: _Length,
        top: int | None,
        client: str,
        kind: str,
    ) -> Job:
        answers = len(prompts) * request.n
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        if len(stops) > MOST_STOPS:
            raise ApiError(
                400, f"expected at most {MOST_STOPS} stops, got {len(stops)}", param="stop"
            )
        if not all(stops):
            raise ApiError(400, "expected stops that are not empty", param="stop")
        loop = asyncio.get_running_loop()
        job = Job(f"{kind}-{uuid.uuid4().hex}", int(time.time()), answers, request.n)
        for number in range(answers):
            prompt = prompts[number // request.n]
            most = self._most(len(prompt), length)
            text = GrowingText(self.tokenizer.inner, [*stops, *self._stops])
            put = _Sender(loop, job.events, number)
            job.sequences.append(self._sequence(request, prompt, most, text, put, client, top))
        for sequence in job.sequences:  # once every prompt is known to fit
            sequence.processor = processor_of(
                self.model,
                torch.tensor([sequence.prompt], device="cpu"),
                None,
                sequence.most,
                sorted(self._ends),
                request.repetition_penalty,
            )
        self.engine.submit(job.sequences)
        return job

    def _sequence(
        self,
        request: Sampling,
        prompt: list[int],
        most: int,
        text: GrowingText,
        put: _Sender,
        client: str,
        top: int | None,
    ) -> Sequence:
        return Sequence(
            prompt=prompt,
            most=most,
            sampler=_sampler(request, put.number % request.n),
            ends=self._ends,
            text=text,
            put=put,
            client=request.user or client,
            deadline=time.monotonic() + self.limits.seconds,
            late=timed_out(self.limits.seconds),
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            top=top,
        )

    def _most(self, length: int, asked: _Length) -> int:
        """The most new tokens for a prompt of `length`. Raises ApiError where they have no room."""
        most, name = asked.most, asked.name
        context = self.limits.context
        room = context - length
        if most is not None and most > self.limits.new:
            raise ApiError(
                400,
                f"expected {name} of at most {self.limits.new}, got {most}; the server's "
                "--max-new-tokens sets the limit",
                param=name,
            )
        if room < (1 if most is None else most):
            wanted = "" if most is None else f" and {most} new ones"
            raise ApiError(
                400,
                f"This model's maximum context length is {context} tokens, and {length} tokens of "
                f"prompt{wanted} were asked for; shorten the prompt"
                + ("" if most is None else f", or ask for fewer by {name}"),
                param="messages" if name != "prompt" and most is None else name,
                code="context_length_exceeded",
            )
        return min(room, self.limits.new) if most is None else most


def separate(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The texts, or tokens, of a field that takes one or several."""
    if isinstance(given, str):
        return [given]
    tokens = [each for each in given if isinstance(each, int)]
    if tokens:
        return [tokens]
    return [each for each in given if not isinstance(each, int)]


@dataclass(frozen=True)
class _Sender:
    """Hands events from the engine's thread to the loop of the server."""

    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[tuple[int, Event]]
    number: int

    def __call__(self, event: Event) -> None:
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, (self.number, event))
        except RuntimeError:
            if not self.loop.is_closed():  # then the server has ended, and nobody listens
                raise


_ONE_TOKEN = 2.0**-126
"""A `top_p` that only the most likely token reaches."""


def _sampler(request: Sampling, number: int) -> Sampler:
    """How a completion's tokens are chosen; each completion of a request has its own seed."""
    seed = None if request.seed is None else (request.seed + number) % 2**64
    return Sampler(request.temperature, request.top_k, request.top_p or _ONE_TOKEN, seed)


def _plain(message: dict[str, object]) -> dict[str, object]:
    """A message whose content is text, as chat templates take it. Raises ApiError for images."""
    if not isinstance(message.get("role"), str):
        raise ApiError(400, "expected each message to have a role", param="messages")
    content = message.get("content")
    if not isinstance(content, list):
        if content is not None and not isinstance(content, str):
            raise ApiError(
                400, f"expected content to be text, got {type(content).__name__}", param="messages"
            )
        return message
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    kinds = [part.get("type") if isinstance(part, dict) else part for part in content]
    if any(kind != "text" for kind in kinds) or not all(isinstance(text, str) for text in texts):
        raise ApiError(400, f"expected parts of type text, got {kinds}", param="messages")
    return {**message, "content": "".join(str(text) for text in texts)}
