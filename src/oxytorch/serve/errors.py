"""Errors as clients see them: an HTTP status and a body in OpenAI's format."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """What a request is refused with.

    status: of HTTP.
    kind: OpenAI's `type`.
    param: the field of the request that is wrong.
    code: one word for programs.
    headers: more of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The body of the response."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def queue_full(waiting: int, seconds: int) -> ApiError:
    """The response where too many requests wait already; seconds: when to try again."""
    return ApiError(
        429,
        f"{waiting} requests wait already; try again in {seconds} s",
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(seconds)},
    )


def timed_out(limit: float) -> ApiError:
    """The response to a request that took longer than the server allows."""
    return ApiError(
        504,
        f"the request took longer than the {limit:g} s that this server allows; ask for less, or "
        "start the server with a larger --timeout",
        kind="timeout_error",
        code="timeout",
    )


def failed(error: BaseException) -> ApiError:
    """The response where the model raised."""
    return ApiError(500, f"{type(error).__name__}: {error}", kind="server_error", code="failed")


def closing() -> ApiError:
    """The response while the server ends."""
    return ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down")
