"""What Ray's HTTP proxies respond where a replica has died: a status that invites a retry.

Each node's Ray is started with RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH set to
`oxytorch.ray.proxy.middlewares`.
"""

from __future__ import annotations

from starlette.middleware import Middleware

from ..serve.access import App, Message, Receive, Send, refuse
from ..serve.errors import ApiError
from ..serve.logs import log


def middlewares() -> list[Middleware]:
    """What Ray asks for."""
    return [Middleware(Answered)]


class Answered:
    """Responds 503 with Retry-After where the proxy would end a request without a response.

    Ray has none for a replica that dies while it computes, which becomes an empty 500. A response
    that has begun ends with the connection.
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except Exception:
            if has_begun:
                raise
            log.exception("the proxy raised")
        if not has_begun:
            await refuse(lost(), send)


def lost() -> ApiError:
    """The response to a request whose replica has died."""
    return ApiError(
        503,
        "the replica that had this request has ended; try again",
        kind="server_error",
        code="replica_lost",
        headers={"Retry-After": "1"},
    )
