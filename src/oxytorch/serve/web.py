"""What routes have in common: bodies, names of models, clients that go away."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from .errors import ApiError
from .metrics import Metrics

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")


async def body_of(request: Request, model: type[Model]) -> Model:
    """The request's body. Raises ApiError where it is not JSON or not what `model` says."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415,
            f"expected the header Content-Type: application/json, got {kind or 'none'}",
        )
    try:
        data = await request.body()
    except ClientDisconnect as error:
        raise _cancelled() from error
    try:
        found = _parsed(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    try:
        return model.model_validate(found)
    except ValidationError as error:
        raise _invalid(error, found) from error


MOST_NESTED = 100
"""Lists and objects within each other: what reads a body further may have Python call itself for
each of them."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _parsed(data: bytes) -> Any:
    """What the JSON says. Raises ValueError also where it is nested too deeply, or has a text that
    is no Unicode: half of a surrogate pair."""
    text = data.decode(json.detect_encoding(data))
    found = json.loads(text, parse_constant=_refuse_constant)
    if _SURROGATE.search(text):
        json.dumps(found, ensure_ascii=False).encode()
    if text.count("[") + text.count("{") > MOST_NESTED:
        _check_nesting(found)
    return found


def _check_nesting(found: Any) -> None:
    level = [found]
    for _ in range(MOST_NESTED + 1):
        values = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for each in values for value in each if isinstance(value, dict | list)]
        if not level:
            return
    raise ValueError(f"lists and objects are nested more than {MOST_NESTED} deep")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _invalid(error: ValidationError, body: Any) -> ApiError:
    first = error.errors(include_url=False)[0]
    place = _place(first["loc"], body, first["type"] == "missing")
    if first["type"] == "extra_forbidden":
        message = f"{place} is not supported by this server; leave it out"
    elif first["type"] == "missing":
        message = f"{place} is missing"
    else:
        given = json.dumps(first.get("input"), default=str)
        shown = given if len(given) <= 100 else given[:100] + "..."
        message = f"{place or 'the body'}: {first['msg']}, got {shown}"
    return ApiError(400, message, param=place or None)


def _place(parts: Sequence[str | int], body: Any, is_missing: bool) -> str:
    """Where in the body an error is, without the types that pydantic tried there."""
    inner = []
    for part in parts:
        is_there = isinstance(body, dict) and part in body
        if is_there or (isinstance(body, list) and isinstance(part, int)):
            inner.append(str(part))
            body = body[part]
    if is_missing:
        inner.append(str(parts[-1]))
    return ".".join(inner)


def check_name(given: str, name: str) -> None:
    """Raises ApiError where a request asks for another model than the one that is served."""
    if given != name:
        raise ApiError(
            404,
            f"The model {given!r} does not exist; this server has {name!r} (GET /v1/models)",
            param="model",
            code="model_not_found",
        )


def client_of(request: Request) -> str:
    """Whom a request comes from, as far as the queue tells clients apart."""
    return request.client.host if request.client else ""


async def unless_gone(
    request: Request, work: Coroutine[Any, Any, Result], metrics: Metrics
) -> Result:
    """What `work` gives; it is cancelled when the client goes away before."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            metrics.cancelled.add()
            raise _cancelled()
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def _cancelled() -> ApiError:
    return ApiError(499, "the client closed the connection", code="cancelled")


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def error_response(error: ApiError) -> JSONResponse:
    """An error as a response."""
    return JSONResponse(error.body(), error.status, error.headers)
