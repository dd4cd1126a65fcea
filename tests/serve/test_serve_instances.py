"""Several instances behind one port: all answer, and one that is killed comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from small_servers import wait_until, write_language_model

import oxytorch
from oxytorch.llm_command.folder import load_model


class Instances:
    """`oxytorch serve --instances` as a process, and what it logs."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "oxytorch", "serve", *words, "--port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{"):
                self.lines.append(json.loads(line))

    def of(self, event: str, name: str) -> list[Any]:
        """A field of all events of this kind so far."""
        return [line[name] for line in list(self.lines) if line["event"] == event]

    def end(self) -> int:
        status = self.process.wait(60)
        self._thread.join()
        return status


@contextmanager
def ready(count: int, model: str, *words: str) -> Iterator[tuple[Instances, str]]:
    """Instances that are all ready, and the address of one; they are asked to end, and end well."""
    server = Instances(model, *words, "--instances", str(count), "--name", "tiny")
    try:
        wait_until(lambda: len(server.of("ready", "url")) == count, 120)
        yield server, server.of("ready", "url")[0]
        server.process.send_signal(signal.SIGTERM)
    except BaseException:
        server.process.kill()
        raise
    finally:
        status = server.end()
    assert status == 0


def test_killed_instance_comes_back_and_the_others_answer(tmp_path: Path) -> None:
    count = min(2, len(os.sched_getaffinity(0)))
    folder = write_language_model(tmp_path / "tiny")
    with ready(count, str(folder)) as (server, url):
        body = {"model": "tiny", "prompt": "Once upon", "max_tokens": 12, "temperature": 0}

        def answer() -> str:
            response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert response.status_code == 200
            return str(response.json()["choices"][0]["text"])

        first = answer()
        started = server.of("instance started", "pid")
        assert len(started) == count
        cores = [os.sched_getaffinity(pid) for pid in started]
        assert all(not cores[0] & other for other in cores[1:])
        os.kill(started[0], signal.SIGKILL)
        wait_until(lambda: len(server.of("ready", "url")) == count + 1, 120)
        assert server.of("instance ended", "status") == [-signal.SIGKILL]
        assert {answer() for _ in range(6)} == {first}
    for pid in server.of("instance started", "pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def held(pid: int, path: Path) -> dict[str, int]:
    """Bytes that a process holds of a mapped file, by the names that Linux gives them."""
    sizes: dict[str, int] = {}
    is_file = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *words = line.split()
        if not name.endswith(":"):
            is_file = line.endswith(str(path))
        elif is_file and words[0].isdigit():
            sizes[name] = sizes.get(name, 0) + int(words[0]) * 1024
    return sizes


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="it reads Linux's smaps")
def test_instances_hold_the_weights_of_a_file_once(tmp_path: Path) -> None:
    folder = write_language_model(tmp_path / "tiny", hidden_size=512, initializer_range=0.02)
    path = tmp_path / "tiny.oxy"
    oxytorch.save(oxytorch.llm.optimize(load_model(folder), inplace=True), path)
    count = min(4, len(os.sched_getaffinity(0)))
    with ready(count, str(path), "--tokenizer", str(folder)) as (server, url):
        body = {"model": "tiny", "prompt": "Once upon", "max_tokens": 4, "temperature": 0}
        for _ in range(4 * count):
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        found = [held(pid, path) for pid in server.of("instance started", "pid")]
    size = path.stat().st_size
    assert max(each["Rss:"] for each in found) >= 0.8 * size
    assert sum(each["Pss:"] for each in found) <= 1.1 * size
    assert sum(each["Anonymous:"] for each in found) == 0  # pages that were written to and copied


def test_mistakes_end_all_instances(tmp_path: Path) -> None:
    nothing = Instances(str(tmp_path), "--instances", "1")
    assert nothing.end() == 2
    assert len(nothing.of("instance started", "pid")) == 1
    many = subprocess.run(
        [sys.executable, "-m", "oxytorch", "serve", str(tmp_path), "--instances", "9999"],
        capture_output=True,
        text=True,
    )
    assert many.returncode == 2
    assert "expected at most" in many.stderr
