"""Connections that end where a client sends no request, or takes nothing of an answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as AutoHTTPProtocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

WAIT_SECONDS = 30.0
"""How long a connection may take to send the head of a request."""

STUCK_SECONDS = 60.0
"""How long a client may take nothing of what waits for it: some ten thousand bytes."""


class Connection(AutoHTTPProtocol):
    """uvicorn's, which by itself waits for both without end."""

    _timers: dict[str, asyncio.TimerHandle]

    def connection_made(self, transport: Any) -> None:
        self._timers = {}
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers.values():
            timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._after("write", STUCK_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._timers["write"].cancel()
        super().resume_writing()

    def _wait(self) -> None:
        self._after("read", WAIT_SECONDS, self._end_without, self.cycle)

    def _end_without(self, last: Any) -> None:
        """Closes unless another request than the last one has begun."""
        if self.cycle is last and (last is None or last.response_complete):
            self.transport.close()

    def _after(self, name: str, seconds: float, call: Any, *given: Any) -> None:
        known = self._timers.get(name)
        if known is not None:
            known.cancel()
        self._timers[name] = asyncio.get_running_loop().call_later(seconds, call, *given)
