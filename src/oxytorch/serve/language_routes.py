"""The routes of a language model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from .answers import Form, streamed, whole
from .language import Job, Language
from .metrics import Metrics
from .requests import Chat, Completion, Sampling, schema
from .web import body_of, check_name, client_of, unless_gone

_Body = TypeVar("_Body", bound=Sampling)


def language_router(language: Language, name: str, metrics: Metrics) -> APIRouter:
    """POST /v1/completions and /v1/chat/completions for the model called `name`."""
    router = APIRouter()

    async def answer(
        request: Request, kind: type[_Body], start: Callable[[_Body, str], Awaitable[Job]]
    ) -> Response:
        body = await body_of(request, kind)
        check_name(body.model, name)
        job = await start(body, client_of(request))
        return await _respond(request, job, _form(body, name, language), body.stream, metrics)

    @router.post("/v1/completions", openapi_extra=schema(Completion))
    async def completions(request: Request) -> Response:
        return await answer(request, Completion, language.complete)

    @router.post("/v1/chat/completions", openapi_extra=schema(Chat))
    async def chat_completions(request: Request) -> Response:
        return await answer(request, Chat, language.chat)

    return router


def _form(body: Sampling, name: str, language: Language) -> Form:
    usage = body.stream_options is not None and body.stream_options.include_usage
    return Form(isinstance(body, Chat), name, language.tokenizer, usage)


async def _respond(
    request: Request, job: Job, form: Form, stream: bool, metrics: Metrics
) -> Response:
    if not stream:
        try:
            return JSONResponse(await unless_gone(request, whole(job, form), metrics))
        finally:
            job.cancel()
    events = _until_gone(job, form, metrics)
    return StreamingResponse(
        events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


async def _until_gone(job: Job, form: Form, metrics: Metrics) -> AsyncIterator[str]:
    """The events; when the client goes away, the places of its completions are freed."""
    is_whole = False
    try:
        async for event in streamed(job, form):
            yield event
        is_whole = True
    finally:
        job.cancel()
        if not is_whole:
            metrics.cancelled.add()
