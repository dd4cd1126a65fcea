"""Responses of a language model in OpenAI's format: whole ones, and streams of their parts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from .errors import ApiError
from .language import Job
from .sequence import End, Logprob, Piece
from .tokens import Tokenizer


@dataclass(frozen=True)
class Form:
    """How the responses to one kind of request look.

    chat: messages, not texts.
    model: the name to tell.
    streams_usage: a last event has the counts.
    """

    chat: bool
    model: str
    tokenizer: Tokenizer
    streams_usage: bool = False

    def envelope(self, job: Job, is_part: bool) -> dict[str, Any]:
        """What stands around the choices."""
        name = "text_completion"
        if self.chat:
            name = "chat.completion.chunk" if is_part else "chat.completion"
        return {"id": job.id, "object": name, "created": job.created, "model": self.model}

    def choice(
        self, number: int, text: str, logprobs: list[Logprob], reason: str | None, offset: int = 0
    ) -> dict[str, Any]:
        """One whole completion."""
        found: dict[str, Any] = {"index": number}
        if self.chat:
            found["message"] = {"role": "assistant", "content": text, "refusal": None}
            found["logprobs"] = self._of_chat(logprobs)
        else:
            found["text"] = text
            found["logprobs"] = self._of_text(logprobs, offset)
        return {**found, "finish_reason": reason}

    def part(
        self, number: int, text: str, logprobs: list[Logprob], reason: str | None, offset: int
    ) -> dict[str, Any]:
        """A part of a completion."""
        found = self.choice(number, text, logprobs, reason, offset)
        if self.chat:
            del found["message"]
            found["delta"] = {"content": text} if text or logprobs else {}
        return found

    def _of_chat(self, logprobs: list[Logprob]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        return {
            "content": [
                {
                    **self._named(each.token, each.value),
                    "top_logprobs": [self._named(*pair) for pair in each.top],
                }
                for each in logprobs
            ],
            "refusal": None,
        }

    def _named(self, token: int, value: float) -> dict[str, Any]:
        text, data = self.tokenizer.piece(token)
        return {"token": text, "logprob": value, "bytes": data}

    def _of_text(self, logprobs: list[Logprob], offset: int) -> dict[str, Any] | None:
        if not logprobs:
            return None
        tokens = [self.tokenizer.piece(each.token)[0] for each in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [each.value for each in logprobs],
            "top_logprobs": [
                {self.tokenizer.piece(token)[0]: value for token, value in each.top}
                for each in logprobs
            ],
            "text_offset": offsets,
        }


@dataclass
class _Answer:
    """What is known of one completion so far. offset: characters of its text that were sent."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    offset: int = 0
    end: End | None = None


async def whole(job: Job, form: Form) -> dict[str, Any]:
    """The body of a response that is not streamed. Raises ApiError where a completion failed."""
    answers = [_Answer() for _ in range(job.answers)]
    async for number, event in job.happened():
        answer = answers[number]
        if isinstance(event, End):
            answer.end = event
            continue
        answer.texts.append(event.text)
        if event.logprob is not None:
            answer.logprobs.append(event.logprob)
    choices = [
        form.choice(number, "".join(answer.texts), answer.logprobs, _reason(answer.end))
        for number, answer in enumerate(answers)
    ]
    usage = _usage(job, [answer.end for answer in answers])
    return {**form.envelope(job, False), "choices": choices, "usage": usage}


async def streamed(job: Job, form: Form) -> AsyncIterator[str]:
    """The events of a streamed response. A failure is reported in the last event."""
    envelope = form.envelope(job, True)
    if form.streams_usage:
        envelope["usage"] = None
    answers = [_Answer() for _ in range(job.answers)]
    if form.chat:
        for number in range(job.answers):
            delta = {"role": "assistant", "content": "", "refusal": None}
            choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
            yield _event({**envelope, "choices": [choice]})
    try:
        async for number, event in job.happened():
            part = _next_part(answers[number], number, event, form)
            if part is not None:
                yield _event({**envelope, "choices": [part]})
    except ApiError as error:
        yield _event(error.body())
        return
    if form.streams_usage:
        usage = _usage(job, [answer.end for answer in answers])
        yield _event({**envelope, "choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def _next_part(
    answer: _Answer, number: int, event: Piece | End, form: Form
) -> dict[str, Any] | None:
    """The part that an event makes; None where its text is not final yet."""
    if isinstance(event, End):
        answer.end = event
        return form.part(number, "", [], _reason(event), answer.offset)
    if not event.text and event.logprob is None:
        return None
    logprobs = [] if event.logprob is None else [event.logprob]
    part = form.part(number, event.text, logprobs, None, answer.offset)
    answer.offset += len(event.text)
    return part


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _reason(end: End | None) -> str:
    assert end is not None and not isinstance(end.reason, ApiError)
    return end.reason


def _usage(job: Job, ends: list[End | None]) -> dict[str, Any]:
    """Counts of tokens; a prompt counts once, whatever n is."""
    known = [end for end in ends if end is not None]
    first = known[:: job.choices]
    prompt = sum(end.prompt_tokens for end in first)
    new = sum(end.new_tokens for end in known)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached for end in first)},
    }
