"""What every request passes: its size, its token, the host that it names; and the log of it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import json
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .errors import ApiError
from .logs import log
from .metrics import Metrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN = ("/health", "/ready")
"""Paths that need no token."""

BODY_SECONDS = 60.0
"""How long a client may take to send its request."""

_LOOPBACK = {"127.0.0.1", "localhost", "[::1]", "::1", "testserver"}


class Gate:
    """Refuses requests that are too large, lack the token, or name another host than this one.

    token: what clients have to give, or None.
    is_local: the server listens to this machine alone; then a web page that a browser here shows
        cannot reach it by a name of its own.
    """

    def __init__(self, app: App, metrics: Metrics, token: str | None, largest: int, is_local: bool):
        self.app = app
        self.metrics = metrics
        self.largest = largest
        self.is_local = is_local
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        call = _Call(scope, send)
        try:
            self._check(call)
            await self.app(scope, self._limited(receive, call), call.send)
        except ApiError as error:
            if call.status is None:
                await refuse(error, call.send)
            else:
                raise
        finally:
            call.finish(self.metrics)

    def _check(self, call: _Call) -> None:
        host = call.headers.get("host", "").strip()
        if self.is_local and self._token is None and _without_port(host) not in _LOOPBACK:
            raise ApiError(403, f"this server is for localhost, not for the host {host!r}")
        if self._token is not None and call.path not in OPEN and not self._knows(call):
            scheme = 'Basic realm="oxytorch"' if call.path == "/" else "Bearer"
            raise ApiError(
                401,
                "expected the server's token: Authorization: Bearer TOKEN (api_key in OpenAI's "
                "clients)",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": scheme},
            )
        length = call.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self.largest:
            raise self._too_large()

    def _knows(self, call: _Call) -> bool:
        """Whether the token was given; as a password for the page that a browser shows."""
        assert self._token is not None
        scheme, _, given = call.headers.get("authorization", "").partition(" ")
        found = given.strip().encode()
        if scheme.lower() == "basic" and call.path == "/":
            try:
                found = base64.b64decode(found, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(found, self._token)

    def _limited(self, receive: Receive, call: _Call) -> Receive:
        """Counts what comes, also where its length was not announced, and how long that takes."""

        async def limited() -> Message:
            if call.is_received:
                return await receive()
            try:
                left = call.begin + BODY_SECONDS - time.monotonic()
                message = await asyncio.wait_for(receive(), max(left, 0))
            except (TimeoutError, asyncio.TimeoutError) as error:  # two classes in Python 3.10
                text = f"the request's body did not come within {BODY_SECONDS:g} s"
                raise ApiError(408, text, kind="timeout_error", code="timeout") from error
            call.is_received = not message.get("more_body", False)
            call.received += len(message.get("body", b""))
            if call.received > self.largest:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"expected a request of at most {self.largest} bytes; send less, or start the server "
            "with a larger --max-request-bytes",
            code="request_too_large",
        )


class _Call:
    """One request, as it is counted and logged."""

    def __init__(self, scope: Message, send: Send) -> None:
        self.begin = time.monotonic()
        self.path: str = scope["path"]
        self.method: str = scope["method"]
        self.scope = scope
        self.headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        self.id = uuid.uuid4().hex
        self.status: int | None = None
        self.received = 0
        self.is_received = False
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
            message = {**message, "headers": headers}
        await self._send(message)

    def finish(self, metrics: Metrics) -> None:
        seconds = time.monotonic() - self.begin
        # Without an answer the client had gone away; 499 is what proxies write then.
        status = 499 if self.status is None else self.status
        route = self.scope.get("route")
        path = getattr(route, "path", "other")  # a label for each path asked for would be many
        metrics.requests.add(path, str(status))
        if path.startswith("/v") and status < 400:
            metrics.duration.observe(seconds)
        log.info(
            "request",
            extra={
                "fields": {
                    "id": self.id,
                    "client": (self.scope.get("client") or ("", 0))[0],
                    "method": self.method,
                    "path": self.path,
                    "status": status,
                    "seconds": round(seconds, 6),
                }
            },
        )


async def refuse(error: ApiError, send: Send) -> None:
    """Sends an error as the whole response."""
    body = json.dumps(error.body()).encode()
    headers = {"content-type": "application/json", **error.headers}
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": error.status, "headers": [*pairs, length]})
    await send({"type": "http.response.body", "body": body})


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.partition(":")[0]
