"""From the options of the command to a server that runs."""

from __future__ import annotations

import argparse
import socket

from .app import State, make_app
from .logs import log, set_up
from .metrics import Metrics
from .opening import open_service
from .server import Server, address, bound_socket


def serve(arguments: argparse.Namespace, token: str | None, is_local: bool) -> None:
    """Serves until a signal. Raises OSError for a port in use and ValueError for a wrong model."""
    set_up(arguments.log_level)
    if arguments.listener is not None:
        listener = socket.socket(fileno=arguments.listener)
    else:
        listener = bound_socket(arguments.host, arguments.port)  # the model takes longer
    with listener:
        metrics, state = Metrics(), State()
        service = open_service(arguments, metrics)
        app = make_app(
            service,
            metrics,
            state,
            token=token,
            largest=arguments.max_request_bytes,
            is_local=is_local,
        )
        service.worker.start()
        try:
            where = address(listener)
            log.info("ready", extra={"fields": {"url": where, "model": service.name}})
            Server(app, state, arguments.drain).run(sockets=[listener])
        finally:
            service.worker.close()
        log.info("ended")
