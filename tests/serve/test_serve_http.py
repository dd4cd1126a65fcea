"""What holds for every server: limits, tokens, errors, queues, its own pages, its end."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from small_servers import Running, application, running, wait_until, write_language_model

from oxytorch.__main__ import main
from oxytorch.serve.server import bound_socket

ASK = {"model": "tiny", "prompt": "Once", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_language_model(tmp_path_factory.mktemp("http") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    limits = ("--max-request-bytes", "2000", "--slots", "2", "--queue", "3")
    with running(str(folder), *limits) as found:
        yield found


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which has to be in OpenAI's format."""
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["content-type"].startswith("application/json")
    return error


NESTED = '{"messages": [{"role": "user", "content": ' + "[" * 150 + "]" * 150 + "}]}"
HALF = '{"messages": [{"role": "user", "content": "\\udbff"}]}'


@pytest.mark.parametrize(
    "body", ["{", "[1", "", '{"prompt": NaN}', "[" * 900, "\ud800", NESTED, HALF]
)
def test_malformed_json_is_refused(server: Running, body: str) -> None:
    data = body.encode("utf-8", "surrogatepass")
    headers = {"content-type": "application/json"}
    answer = httpx.post(server.url + "/v1/completions", content=data, headers=headers)
    assert answer.status_code == 400
    assert "not JSON" in error_of(answer)["message"]


def test_characters_beyond_16_bits_are_taken_as_pairs_of_escapes(server: Running) -> None:
    texts = []
    for prompt in ("\\ud83d\\ude00", "\U0001f600"):
        body = json.dumps(ASK).replace("Once", prompt).encode()
        headers = {"content-type": "application/json"}
        answer = httpx.post(server.url + "/v1/completions", content=body, headers=headers)
        assert answer.status_code == 200
        texts.append(answer.json()["choices"][0]["text"])
    assert texts[0] == texts[1]


def test_null_is_a_field_left_out_also_within_others(server: Running) -> None:
    body = {**ASK, "temperature": 0, "n": None, "stream_options": {"include_usage": None}}
    assert httpx.post(server.url + "/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("value", ["1e999", "-1e999"])
def test_numbers_beyond_floats_are_refused(server: Running, value: str) -> None:
    body = json.dumps({**ASK, "repetition_penalty": 5}).replace("5}", value + "}").encode()
    headers = {"content-type": "application/json"}
    answer = httpx.post(server.url + "/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert "repetition_penalty" in error_of(answer)["message"]


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_may_ask_for_headers_alone(server: Running, path: str) -> None:
    answer = httpx.head(server.url + path)
    assert answer.status_code == 200
    assert not answer.content


@pytest.mark.parametrize("body", ["1", "null", '"text"', "[]", "{}"])
def test_json_of_another_kind_is_refused(server: Running, body: str) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(server.url + "/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400 and error_of(answer)["message"]


def test_other_content_type_is_refused(server: Running) -> None:
    answer = httpx.post(server.url + "/v1/completions", data={"model": "tiny"})
    assert answer.status_code == 415
    assert "application/json" in error_of(answer)["message"]


def test_oversize_request_is_refused_with_and_without_its_length(server: Running) -> None:
    large = json.dumps({**ASK, "prompt": "x" * 3000})
    headers = {"content-type": "application/json"}
    for content in (large, iter([large.encode()])):
        answer = httpx.post(server.url + "/v1/completions", content=content, headers=headers)
        assert answer.status_code == 413
        assert "at most 2000 bytes" in error_of(answer)["message"]


def test_unknown_path_and_method_are_refused(server: Running) -> None:
    assert httpx.get(server.url + "/v1/nothing").status_code == 404
    answer = httpx.get(server.url + "/v1/completions")
    assert answer.status_code == 405 and error_of(answer)


def test_host_of_a_web_page_is_refused(server: Running) -> None:
    answer = httpx.get(server.url + "/v1/models", headers={"host": "evil.example"})
    assert answer.status_code == 403 and error_of(answer)


def test_own_pages(server: Running) -> None:
    httpx.post(server.url + "/v1/completions", json=ASK)
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    assert httpx.get(server.url + "/ready").json() == {"status": "ready"}
    models = httpx.get(server.url + "/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert httpx.get(server.url + "/v1/models/tiny").json()["max_model_len"] == 512
    assert httpx.get(server.url + "/v1/models/other").status_code == 404
    page = httpx.get(server.url + "/")
    assert "time to the first token" in page.text and "tiny (language)" in page.text
    schema = httpx.get(server.url + "/openapi.json").json()
    assert "/v1/chat/completions" in schema["paths"]


def test_metrics_are_in_prometheus_format(server: Running) -> None:
    httpx.post(server.url + "/v1/completions", json=ASK)
    answer = httpx.get(server.url + "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    values: dict[str, float] = {}
    for line in answer.text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
    assert values['oxytorch_requests_total{path="/v1/completions",status="200"}'] >= 1
    assert values['oxytorch_tokens_total{kind="new"}'] >= 4
    assert values["oxytorch_slots"] == 2
    assert values["oxytorch_first_token_seconds_count"] >= 1
    buckets = [v for name, v in values.items() if name.startswith("oxytorch_step_seconds_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] == values["oxytorch_step_seconds_count"]


def test_full_queue_says_when_to_come_again(server: Running) -> None:
    body = {**ASK, "max_tokens": 400}

    def ask(_: int) -> httpx.Response:
        return httpx.post(server.url + "/v1/completions", json=body, timeout=60)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    full = next(answer for answer in answers if answer.status_code == 429)
    assert int(full.headers["retry-after"]) >= 1
    assert error_of(full)["code"] == "queue_full"
    texts = {a.json()["choices"][0]["text"] for a in answers if a.status_code == 200}
    assert len(texts) == 1


def test_time_limit_ends_a_request(folder: Path) -> None:
    with running(str(folder), "--timeout", "0.2") as server:
        body = {**ASK, "max_tokens": 500, "n": 8}
        answer = httpx.post(server.url + "/v1/completions", json=body)
        assert answer.status_code == 504 and error_of(answer)["code"] == "timeout"
        wait_until(lambda: server.figure("oxytorch_running") == 0)
        events = httpx.post(server.url + "/v1/completions", json={**body, "stream": True}).text
        assert '"code":"timeout"' in events and "[DONE]" not in events


def test_token_is_asked_for(folder: Path) -> None:
    with running(str(folder), "--token", "secret") as server:
        assert httpx.get(server.url + "/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            answer = httpx.post(server.url + "/v1/completions", json=ASK, headers=headers)
            assert answer.status_code == 401
            assert error_of(answer)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert httpx.get(server.url + "/metrics").status_code == 401
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0)
        assert client.models.list().data[0].id == "tiny"
        wrong = openai.OpenAI(base_url=server.url + "/v1", api_key="other", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        page = httpx.get(server.url + "/")
        assert page.status_code == 401 and page.headers["www-authenticate"].startswith("Basic")
        word = base64.b64encode(b"anyone:secret").decode()
        page = httpx.get(server.url + "/", headers={"authorization": f"Basic {word}"})
        assert page.status_code == 200


def test_application_answers_without_a_socket(folder: Path) -> None:
    import asyncio

    app, service, metrics = application(str(folder))
    service.worker.start()

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/completions", json=ASK)

    try:
        answer = asyncio.run(ask())
    finally:
        service.worker.close()
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    assert metrics.requests.of("/v1/completions", "200") == 1


def test_mistakes_of_the_command_are_told(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("oxytorch.serve.serving.set_up", lambda level: None)

    def said(*words: str) -> str:
        assert main(["serve", *words]) == 2
        return capsys.readouterr().err

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert "choose another with --port" in said(str(folder), "--port", port)
    assert "give --token" in said(str(folder), "--host", "0.0.0.0")
    assert "not empty" in said(str(folder), "--token", " ")
    assert "is no model" in said(str(tmp_path), "--port", "0")
    assert "512 positions, got 1000" in said(str(folder), "--port", "0", "--context", "1000")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "merge it" in said(str(tmp_path), "--port", "0")
    (tmp_path / "config.json").write_text("[]")
    assert "expected an object in JSON, got a list" in said(str(tmp_path), "--port", "0")
    nowhere = ("--port", "0", "--tokenizer", str(tmp_path / "nowhere"))
    assert "there is no folder" in said(str(folder), *nowhere)
    assert "--instances: expected at most" in said(str(folder), "--port", "0", "--instances", "999")
    many = ("--port", "0", "--slots", str(10**9))
    assert f"the keys and values of {10**9} slots" in said(str(folder), *many)
    assert "--pooling is an option" in said(str(folder), "--port", "0", "--pooling", "cls")


def test_small_responses_are_sent_at_once() -> None:
    seen: list[int] = []

    class Watched(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            connection = transport.get_extra_info("socket")
            seen.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    async def connect() -> None:
        with bound_socket("127.0.0.1", 0) as listener:
            server = await asyncio.get_running_loop().create_server(Watched, sock=listener)
            _, writer = await asyncio.open_connection(*listener.getsockname())
            while not seen:
                await asyncio.sleep(0.01)
            writer.close()
            server.close()

    asyncio.run(connect())
    assert seen[0]


class Process:
    """`oxytorch serve` as a process of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        command = [sys.executable, "-m", "oxytorch", "serve", str(folder), "--port", "0", *words]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
        self.lines: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        wait_until(lambda: self._ready() or self.process.poll() is not None, 60)
        self.url = self._ready()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{"):
                self.lines.append(json.loads(line))

    def _ready(self) -> str:
        return next((str(line["url"]) for line in self.lines if line["event"] == "ready"), "")

    def end(self) -> int:
        status = self.process.wait(30)
        self._thread.join()
        return status


def test_signal_finishes_what_runs(folder: Path) -> None:
    process = Process(folder)
    body = {**ASK, "max_tokens": 500}
    with ThreadPoolExecutor(2) as pool:
        url = process.url + "/v1/completions"
        running_one = pool.submit(httpx.post, url, json={**body, "n": 8}, timeout=60)
        wait_until(lambda: " 8\n" in _metric(process.url, "oxytorch_running"))
        process.process.send_signal(signal.SIGTERM)
        answer = running_one.result()
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 8 * 500
    assert process.end() == 0
    request = next(line for line in process.lines if line.get("path") == "/v1/completions")
    assert request["status"] == 200 and request["seconds"] > 0
    assert process.lines[-1]["event"] == "ended"


def test_drain_limit_ends_the_server(folder: Path) -> None:
    process = Process(folder, "--drain", "1")
    body = {**ASK, "max_tokens": 500, "n": 16, "stream": True}
    with httpx.stream("POST", process.url + "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
        begin = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        assert process.end() == 0
    assert time.monotonic() - begin < 20


def _metric(url: str, name: str) -> str:
    lines = httpx.get(url + "/metrics").text.splitlines(keepends=True)
    return next(line for line in lines if line.startswith(name + " "))
