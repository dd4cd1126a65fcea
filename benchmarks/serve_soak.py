"""A server under load for minutes: slow, broken, oversize and vanishing clients, killed instances.

Starts `oxytorch serve --instances 2` with a small model of random weights, asks it from many
clients, and kills an instance now and then; the first one lives from begin to end, so that its
memory is seen for all of the time. Each answer is compared with the one that the server
gave to the same request alone. At the end: counts, memory of the instances over time, and whether
all instances are back. The exit status is 1 where an answer was wrong or lost, memory has grown, or
an instance is missing.

    python benchmarks/serve_soak.py --minutes 20
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from datetime import date
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "serve"))

from small_servers import write_language_model

from oxytorch.core import processor

CLIENTS = 12
RETRIES = (429, 503)
GROWTH = 1.1
"""Of an instance's memory from the first third of its life to the last: more is a leak."""


class Server:
    """The instances, and what they log."""

    def __init__(self, folder: Path, instances: int) -> None:
        words = [str(folder), "--name", "tiny", "--port", "0", "--instances", str(instances)]
        limits = [
            "--queue",
            "16",
            "--slots",
            "4",
            "--context",
            "256",
            "--max-request-bytes",
            "65536",
        ]
        command = [sys.executable, "-m", "oxytorch", "serve", *words, *limits]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.events: list[dict[str, Any]] = []
        self.instances = instances
        threading.Thread(target=self._read, daemon=True).start()
        self.wait_for_ready(instances)
        self.url = next(event["url"] for event in self.events if event["event"] == "ready")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{"):
                event = json.loads(line)
                if event["event"] != "request":
                    self.events.append(event)

    def ready(self) -> int:
        """How many instances have become ready so far."""
        return sum(event["event"] == "ready" for event in list(self.events))

    def wait_for_ready(self, count: int) -> bool:
        """Whether so many instances have become ready within two minutes."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            if self.ready() >= count:
                return True
            time.sleep(0.05)
        return False

    def pids(self) -> dict[int, int]:
        """The process of each instance."""
        started = [event for event in list(self.events) if event["event"] == "instance started"]
        return {event["instance"]: event["pid"] for event in started}


class Soak:
    def __init__(self, server: Server, minutes: float) -> None:
        self.server = server
        self.until = time.monotonic() + 60 * minutes
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.kills = 0
        self.memory: dict[int, list[int]] = collections.defaultdict(list)
        self._lock = threading.Lock()
        self._requests = [self._request(number) for number in range(48)]
        self._expected = [self._alone(body) for body in self._requests]

    @staticmethod
    def _request(number: int) -> dict[str, Any]:
        draw = random.Random(number)
        words = " ".join(
            draw.choice(("once", "upon", "a", "time", "tiny")) for _ in range(3 + number)
        )
        body = {"model": "tiny", "prompt": words, "max_tokens": draw.randint(4, 48)}
        sampled = {"temperature": 0.8, "seed": number} if number % 3 == 0 else {"temperature": 0}
        return {**body, **sampled}

    def _alone(self, body: dict[str, Any]) -> str:
        response = httpx.post(f"{self.server.url}/v1/completions", json=body, timeout=60)
        response.raise_for_status()
        return str(response.json()["choices"][0]["text"])

    def run(self) -> None:
        clients = [threading.Thread(target=self._client, args=(n,)) for n in range(CLIENTS)]
        for each in clients:
            each.start()
        next_kill = time.monotonic() + 20
        while time.monotonic() < self.until:
            time.sleep(1)
            if self.server.ready() < self.server.instances + self.kills:
                continue  # one is being brought back: what it takes meanwhile is no leak
            for pid in self.server.pids().values():
                if resident := _resident(pid):
                    self.memory[pid].append(resident)
            if time.monotonic() > next_kill and self.until - time.monotonic() > 30:
                self._kill()
                next_kill = time.monotonic() + 75
        for each in clients:
            each.join()

    def _kill(self) -> None:
        self.kills += 1
        pids = self.server.pids()
        others = sorted(pids)[1:] or sorted(pids)
        os.kill(pids[others[self.kills % len(others)]], signal.SIGKILL)

    def _client(self, number: int) -> None:
        draw = random.Random(1000 + number)
        kinds = [
            self._whole,
            self._stream,
            self._vanishing,
            self._broken,
            self._oversize,
            self._slow,
            self._unread,
        ]
        weights = [10, 6, 2, 1, 1, 1, 1]
        while time.monotonic() < self.until:
            kind = draw.choices(kinds, weights)[0]
            which = draw.randrange(len(self._requests))
            name = kind.__name__.lstrip("_")
            try:
                found = kind(which)
            except (httpx.TransportError, OSError):
                found = "connection lost"
            with self._lock:
                self.counts[f"{name}: {found}"] += 1

    def _checked(self, which: int, text: str) -> str:
        if text != self._expected[which]:
            with self._lock:
                self.wrong.append(f"request {which}: {text!r}, alone {self._expected[which]!r}")
            return "wrong"
        return "as alone"

    def _status(self, response: httpx.Response, wanted: tuple[int, ...]) -> str:
        if response.status_code not in wanted:
            with self._lock:
                self.wrong.append(f"status {response.status_code}: {response.text[:200]}")
        return f"refused with {response.status_code}"

    def _whole(self, which: int) -> str:
        body = self._requests[which]
        response = httpx.post(f"{self.server.url}/v1/completions", json=body, timeout=120)
        if response.status_code != 200:
            time.sleep(0.1)
            return self._status(response, RETRIES)
        return self._checked(which, response.json()["choices"][0]["text"])

    def _stream(self, which: int) -> str:
        body = {**self._requests[which], "stream": True}
        parts, is_whole = [], False
        url = f"{self.server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=120) as response:
            if response.status_code != 200:
                response.read()
                time.sleep(0.1)
                return self._status(response, RETRIES)
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    is_whole = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return f"error event {event['error']['code']}"
                    parts += [choice["text"] for choice in event["choices"]]
        return self._checked(which, "".join(parts)) if is_whole else "connection lost"

    def _vanishing(self, which: int) -> str:
        body = {**self._requests[which], "stream": True, "max_tokens": 150}
        url = f"{self.server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=120) as response:
            for _ in response.iter_lines():
                break
        return "gone"

    def _unread(self, which: int) -> str:
        """Asks for an answer in parts, reads none of them, and goes."""
        parts = urllib.parse.urlsplit(self.server.url)
        assert parts.hostname is not None and parts.port is not None
        body = {**self._requests[which], "stream": True, "max_tokens": 150, "logprobs": 5}
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.settimeout(120)
            connection.connect((parts.hostname, parts.port))
            connection.sendall(_post(parts.netloc, json.dumps(body).encode()))
            time.sleep(3)
        return "gone"

    def _broken(self, which: int) -> str:
        content = json.dumps(self._requests[which])[: -1 - which % 7]
        headers = {"content-type": "application/json"}
        url = f"{self.server.url}/v1/completions"
        return self._status(httpx.post(url, content=content, headers=headers, timeout=60), (400,))

    def _oversize(self, which: int) -> str:
        body = {**self._requests[which], "prompt": "a" * 70000}
        url = f"{self.server.url}/v1/completions"
        return self._status(httpx.post(url, json=body, timeout=60), (413,))

    def _slow(self, which: int) -> str:
        """Sends its request in drops, and reads the answer so."""
        parts = urllib.parse.urlsplit(self.server.url)
        assert parts.hostname is not None and parts.port is not None
        sent = _post(parts.netloc, json.dumps(self._requests[which]).encode())
        with socket.create_connection((parts.hostname, parts.port), timeout=120) as connection:
            for start in range(0, len(sent), 16):
                connection.sendall(sent[start : start + 16])
                time.sleep(0.05)
            answer = b""
            while part := connection.recv(16):
                answer += part
        status, _, rest = answer.partition(b"\r\n")
        words = status.split()
        if len(words) < 2:
            return "connection lost"
        if words[1] != b"200":
            return "refused with " + words[1].decode()
        return self._checked(
            which, json.loads(rest.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
        )


def _post(host: str, content: bytes) -> bytes:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def _resident(pid: int) -> int:
    """Bytes, or 0 where the process has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth(samples: list[int]) -> float:
    """The median of the last third over that of the first, without the start of the process."""
    settled = samples[15:]
    third = len(settled) // 3
    if third < 10:
        return 1.0
    first, last = sorted(settled[:third]), sorted(settled[-third:])
    return last[third // 2] / first[third // 2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--instances", type=int, default=2)
    given = parser.parse_args()
    begun = time.monotonic()
    print(
        f"{date.today()}, {processor.model()}, {given.minutes:g} minutes, {CLIENTS} clients, "
        f"{given.instances} instances"
    )
    with tempfile.TemporaryDirectory() as folder:
        server = Server(write_language_model(Path(folder) / "tiny"), given.instances)
        try:
            soak = Soak(server, given.minutes)
            soak.run()
            is_back = server.wait_for_ready(given.instances + soak.kills)
        finally:
            server.process.send_signal(signal.SIGTERM)
            status = server.process.wait(120)
    for name, count in sorted(soak.counts.items()):
        print(f"{count:7d}  {name}")
    largest = 1.0
    for pid, samples in soak.memory.items():
        largest = max(largest, growth(samples))
        shown = f"{samples[-1] / 2**20:.0f} MiB after {len(samples)} s, x {growth(samples):.3f}"
        print(f"instance of process {pid}: {shown}")
    print(f"{time.monotonic() - begun:.0f} s in all, {sum(soak.counts.values())} requests")
    print(f"{soak.kills} instances killed, all back: {is_back}; exit status {status}")
    for text in soak.wrong[:5]:
        print("wrong:", text)
    print(f"{len(soak.wrong)} wrong answers")
    return int(bool(soak.wrong) or largest > GROWTH or not is_back or status != 0)


if __name__ == "__main__":
    sys.exit(main())
