"""`oxytorch serve` beside llama.cpp's server: the same random weights, the same load, in turns.

Writes the model of a shape for both: a file of ours for each precision, a GGUF in Q4_0 or Q8_0 (the
package gguf), and a vocabulary of made-up words. Then each server is started, asked by so many
clients as `oxytorch bench serve` does, and ended. llama.cpp's server is built from its sources,
which the sdist of llama-cpp-python has in vendor/llama.cpp:

    cmake -S vendor/llama.cpp -B build -DGGML_NATIVE=ON -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build build --target llama-server
    python benchmarks/serve_peers.py --folder models --only write
    python benchmarks/serve_peers.py --folder models --llama-server build/bin/llama-server
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import oxytorch
from oxytorch.benchmark.llm.shapes import SHAPES, random_model
from oxytorch.benchmark.peers.llm.llamacpp import TYPES, write_gguf
from oxytorch.benchmark.serve.command import table
from oxytorch.benchmark.serve.load import Load, measured
from oxytorch.llm_command.options import PRECISIONS

PORT = 8765
SPECIAL = ("<unk>", "<s>", "</s>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("serve-peers"), help="of the models")
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--weights", default="int4,int4-int8", help="precisions of ours")
    parser.add_argument("--llama-server", type=Path, help="its program; without it ours alone")
    parser.add_argument("--only", help="one of the contestants, or write")
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--requests", default="3,1,1", help="of each client, by their number")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--context", type=int, default=704, help="tokens of a slot")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the server too
    given.folder.mkdir(exist_ok=True)
    precisions = given.weights.split(",")
    write(given.folder, given.shape, precisions)
    if given.only == "write":
        return
    names = [*precisions, *(["llama.cpp"] if given.llama_server else [])]
    for name in names:
        if given.only in (None, name):
            measure(given, name)


def write(folder: Path, shape: str, precisions: list[str]) -> None:
    """The files that are missing."""
    count = SHAPES[shape].settings["vocab_size"]
    words = [*SPECIAL, *(f"w{number}" for number in range(len(SPECIAL), count))]
    write_tokenizer(folder / "tokenizer", words)
    kinds = {TYPES[PRECISIONS[name].weights or "bf16"] for name in precisions}
    for kind in kinds:
        path = folder / f"{kind}.gguf"
        if not path.exists():
            write_gguf(random_model(shape), kind, path, words)
    for name in precisions:
        path = folder / f"{name}.oxy"
        if not path.exists():
            precision = PRECISIONS[name]
            model = oxytorch.llm.optimize(
                random_model(shape),
                weights=precision.weights,
                activation_dtype=precision.activation_dtype,
                inplace=True,
            )
            oxytorch.save(model, path)


def write_tokenizer(folder: Path, words: list[str]) -> None:
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>").save_pretrained(folder)


def measure(given: Any, name: str) -> None:
    """One server from its start to its end."""
    command = command_of(given, name)
    with open(given.folder / f"{name}.log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{PORT}"
        wait(url, server)
        load = Load(url, "model", (50, 500), (50, 200), 1, 256)
        measured(load, 2, lambda _: None)
        found = []
        for count, requests in zip(
            map(int, given.clients.split(",")), map(int, given.requests.split(",")), strict=True
        ):
            own = Load(**{**vars(load), "seed": count, "requests": requests})
            found.append(measured(own, count, lambda line: print(line, file=sys.stderr)))
        print(
            f"\n{name}, {given.slots} slots, {given.threads} threads:\n{table(found)}", flush=True
        )
        print(json.dumps({"name": name, "results": [each.as_data() for each in found]}))
    finally:
        server.terminate()
        server.wait()


def command_of(given: Any, name: str) -> list[str]:
    if name != "llama.cpp":
        words = ["--tokenizer", str(given.folder / "tokenizer"), "--name", "model"]
        sizes = ["--slots", str(given.slots), "--context", str(given.context)]
        rest = ["--port", str(PORT), "--threads", str(given.threads), "--log-level", "warning"]
        program = [sys.executable, "-m", "oxytorch", "serve", str(given.folder / f"{name}.oxy")]
        return [*program, *words, *sizes, *rest]
    kind = TYPES[PRECISIONS[given.weights.split(",")[0]].weights or "bf16"]
    context = ["-c", str(given.slots * given.context), "-np", str(given.slots)]
    threads = ["-t", str(given.threads), "-tb", str(given.threads), "--port", str(PORT)]
    model = ["-m", str(given.folder / f"{kind}.gguf"), "-a", "model", "--no-warmup", "-cb"]
    return [str(given.llama_server), *model, *context, *threads]


def wait(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}; see its log")
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise TimeoutError("the server did not become ready")


if __name__ == "__main__":
    main()
