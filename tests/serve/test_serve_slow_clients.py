"""Clients that send in drops, send nothing, or read nothing: each ends, and others are served."""

from __future__ import annotations

import contextlib
import json
import socket
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from small_servers import Running, running, wait_until, write_language_model

from oxytorch.serve import access, connections


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = write_language_model(tmp_path_factory.mktemp("model") / "tiny")
    with running(str(folder), "--slots", "2", "--context", "512") as found:
        yield found


def connected(server: Running, buffer: int | None = None) -> socket.socket:
    parts = urllib.parse.urlsplit(server.url)
    found = socket.socket()
    if buffer is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    found.settimeout(20)
    found.connect((parts.hostname, parts.port))
    return found


def head(server: Running, length: int) -> bytes:
    host = urllib.parse.urlsplit(server.url).netloc
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def answers(server: Running) -> bool:
    body = {"model": "tiny", "prompt": "once", "max_tokens": 3}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).status_code == 200


def test_body_in_drops_is_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "BODY_SECONDS", 0.5)
    with connected(server) as connection:
        connection.sendall(head(server, 1000) + b"{")
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
    assert answers(server)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HT"])
def test_connection_without_a_request_is_closed(
    server: Running, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "WAIT_SECONDS", 0.5)
    begin = time.monotonic()
    with connected(server) as connection:
        connection.sendall(sent)
        assert connection.recv(100) == b""
    assert 0.3 < time.monotonic() - begin < 10


def test_long_answer_outlives_the_time_for_a_request(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "WAIT_SECONDS", 0.05)
    body = {"model": "tiny", "prompt": "once", "max_tokens": 300, "temperature": 0}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.json()["usage"]["completion_tokens"] == 300


def test_client_that_reads_nothing_is_cut_off_and_its_slot_is_free(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "STUCK_SECONDS", 0.5)
    made = connections.Connection.connection_made

    def small(self: connections.Connection, transport: Any) -> None:
        # Else the system holds some megabytes of an answer.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(connections.Connection, "connection_made", small)
    before = server.metrics.cancelled.total
    body = json.dumps(
        {"model": "tiny", "prompt": "once", "max_tokens": 480, "stream": True, "n": 8,
         "logprobs": 20}
    ).encode()  # fmt: skip
    with connected(server, buffer=2048) as connection:
        connection.sendall(head(server, len(body)) + body)
        assert answers(server)  # the answers to who does read are not held up
        wait_until(lambda: server.metrics.cancelled.total == before + 1, 60)
        wait_until(lambda: server.figure("oxytorch_running") == 0, 60)
        with contextlib.suppress(ConnectionError):  # or it ends without one
            while connection.recv(65536):
                pass
    assert answers(server)
