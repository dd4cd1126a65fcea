"""Listening: the socket, and uvicorn on it until a signal asks for the end."""

from __future__ import annotations

import socket
from types import FrameType
from typing import Any

import uvicorn

from .access import App
from .app import State
from .connections import Connection
from .logs import log


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket with this address. Raises OSError, with the option to change, where it cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By the protocol's number asyncio knows to send what is small at once (TCP_NODELAY).
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        raise OSError(
            f"cannot listen to port {port} of {host}: {error}; choose another with --port (0 takes "
            "a free one) or --host"
        ) from error
    return found


class Server(uvicorn.Server):
    """uvicorn that says when no more requests are wanted."""

    def __init__(self, app: App, state: State, drain: int) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=drain,
            timeout_keep_alive=30,
            server_header=False,
        )
        super().__init__(config)
        self.state = state

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A first signal finishes what runs, a second one does not wait."""
        self.state.draining = True
        log.info("shutting down", extra={"fields": {"signal": sig}})
        # uvicorn's own would raise the signal again afterwards, before the engine has ended.
        self.force_exit = self.should_exit
        self.should_exit = True


def address(listener: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port, *_ = listener.getsockname()
    name: Any = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"
