"""Clients that ask a server at the same time, and what each of them waits."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Load:
    """What clients ask: `requests` each, one after the other.

    Lengths depend on a request's number alone: as many requests of more clients are the same work.
    prompt, tokens: of a prompt, and new ones, at least and at most; prompts are all others than any
        other.
    vocabulary: prompts are of tokens below this.
    logprobs: asks for them, so that every token comes as a part of its own, whatever its text is.
    """

    url: str
    model: str
    prompt: tuple[int, int]
    tokens: tuple[int, int]
    requests: int
    vocabulary: int
    logprobs: bool = False
    token: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """When the parts of a streamed answer came, in seconds from the request; new: its tokens."""

    times: tuple[float, ...]
    new: int


@dataclass(frozen=True)
class Figures:
    """What a number of clients saw.

    tokens_per_second: new tokens of all clients.
    first_token, between: medians and 95th percentiles of the time to the first part of an answer
        and of the time between two parts, in seconds.
    """

    clients: int
    answers: int
    new_tokens: int
    seconds: float
    tokens_per_second: float
    first_token: float
    first_token_95: float
    between: float
    between_95: float

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def models_of(url: str, token: str | None) -> list[str]:
    """The names of a server's models. Raises OSError or ValueError where none answers."""
    with _Connection(url, token) as connection:
        found = connection.ask("GET", "/v1/models", None)
        return [str(model["id"]) for model in json.loads(found.read())["data"]]


def measured(load: Load, clients: int, tell: Callable[[str], object]) -> Figures:
    """What `clients` clients see that ask at the same time. Raises ValueError where one fails."""
    barrier = threading.Barrier(clients + 1)
    with ThreadPoolExecutor(clients) as pool:
        futures = [
            pool.submit(_client, load, range(number, clients * load.requests, clients), barrier)
            for number in range(clients)
        ]
        barrier.wait()
        begin = time.perf_counter()
        answers = [answer for future in futures for answer in future.result()]
        seconds = time.perf_counter() - begin
    first = [answer.times[0] for answer in answers]
    between = [after - before for a in answers for before, after in pairwise(a.times)]
    new = sum(answer.new for answer in answers)
    found = Figures(
        clients,
        len(answers),
        new,
        seconds,
        new / seconds,
        statistics.median(first),
        _percentile(first, 95),
        statistics.median(between) if between else 0.0,
        _percentile(between, 95),
    )
    tell(f"{clients} clients: {found.tokens_per_second:.1f} tokens/s")
    return found


def _percentile(values: list[float], percent: int) -> float:
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def _client(load: Load, numbers: range, barrier: threading.Barrier) -> list[Answer]:
    barrier.wait()
    with _Connection(load.url, load.token) as connection:
        return [_answer(connection, load, number) for number in numbers]


def _answer(connection: _Connection, load: Load, number: int) -> Answer:
    lengths = random.Random(number)  # of any seed, so that other clients have the same to do
    draw = random.Random(f"{load.seed} {number}")
    body = {
        "model": load.model,
        "prompt": [draw.randrange(load.vocabulary) for _ in range(lengths.randint(*load.prompt))],
        "max_tokens": lengths.randint(*load.tokens),
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.logprobs:
        body["logprobs"] = 0
    begin = time.perf_counter()
    response = connection.ask("POST", "/v1/completions", body)
    times, new = [], 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise ValueError(f"bench serve: the server failed: {event['error']['message']}")
        if event["choices"]:
            times.append(time.perf_counter() - begin)
        if event.get("usage"):
            new = int(event["usage"]["completion_tokens"])
    if not times:
        raise ValueError(
            "bench serve: the server sent an answer without a part; ask for --logprobs where "
            "tokens may have no text"
        )
    return Answer(tuple(times), new)


class _Connection:
    """One connection, which requests go through one after the other."""

    def __init__(self, url: str, token: str | None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"bench serve: expected a URL such as http://127.0.0.1:8000, got {url}"
            )
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._inner = kind(parts.hostname, parts.port, timeout=600)
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self._inner.close()

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> http.client.HTTPResponse:
        """The response. Raises ValueError for one that is no success."""
        data = None if body is None else json.dumps(body)
        try:
            self._inner.request(method, path, data, self._headers)
            response = self._inner.getresponse()
        except http.client.RemoteDisconnected:  # servers may close one between two requests
            self._inner.close()
            self._inner.request(method, path, data, self._headers)
            response = self._inner.getresponse()
        if response.status != 200:
            text = response.read().decode("utf-8", "replace")
            raise ValueError(f"bench serve: {path} answered {response.status}: {text[:300]}")
        return response
