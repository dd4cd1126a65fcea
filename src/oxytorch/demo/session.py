"""One run of the demo: loads, optimizes, embeds, times and searches."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median_low

import torch

from .embedding import BATCH, TEXT, Embedder, batches, load_model, load_tokenizer, read_texts
from .measure import interleaved, peak_memory
from .variants import OPTIMIZED, STOCK, VARIANTS

# Largest allowed difference of an entry of an fp32 vector of length 1: rounding in another order
# moves one by some 1e-7, a wrong formula by 1e-3 and more.
TOLERANCE = 1e-5
MOST_TEXTS = 2000
NEAREST = 3


@dataclass(frozen=True)
class Row:
    """One variant's result. latency in seconds, throughput in texts a second, peak in bytes.

    difference: largest absolute difference to stock over all entries of all vectors.
    cosine: the smallest cosine similarity of a vector to the one that stock gives.
    """

    name: str
    latency: float
    throughput: float
    peak: int | None
    difference: float
    cosine: float


class Session:
    """The inputs of one run and, after `run`, its results.

    rows: one per variant, in order.
    explanation: what `optimize` did.
    nearest: for each query and variant the rows of the nearest texts with their similarity, best
        first.
    load: how many programs wanted to run, on average, in the minute before.
    """

    def __init__(self, text: Path | None, queries: Sequence[str], seconds: float) -> None:
        self.path = text or TEXT
        self.texts = read_texts(self.path, MOST_TEXTS)
        self.queries = list(queries)
        self.seconds = seconds
        self.load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        self.batches = -(-len(self.texts) // BATCH)
        self.steps = 4 + self.batches
        self.parameters = 0
        self.timed_tokens = 0
        self.rows: list[Row] = []
        self.explanation = ""
        self.nearest: dict[str, dict[str, list[tuple[float, int]]]] = {}

    @property
    def faithful(self) -> bool:
        """Whether the optimized fp32 model gives the outputs of stock."""
        row = next(row for row in self.rows if row.name == OPTIMIZED.name)
        return row.difference <= TOLERANCE

    def run(self, begin: Callable[[str], None]) -> None:
        """Does all the work; calls `begin` with a few words at the start of each step."""
        begin("loading the model")
        tokenizer = load_tokenizer()
        model = load_model()
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        begin("optimizing the model")
        sample = Embedder(model, tokenizer).tokens(self.texts[:2])
        embedders = {
            variant.name: Embedder(variant.build(model, sample), tokenizer) for variant in VARIANTS
        }
        import oxytorch

        self.explanation = str(oxytorch.explain(embedders[OPTIMIZED.name].model))

        begin("timing one text")
        latency = self._time_one_text(embedders)
        vectors, throughput = self._embed_texts(embedders, begin)
        self._search(embedders, vectors)
        begin("measuring memory")
        # Two processes at a time: nothing is timed any more.
        with ThreadPoolExecutor(max_workers=2) as pool:
            measured = pool.map(partial(peak_memory, text=self.path, most=MOST_TEXTS), vectors)
            peaks = dict(zip(vectors, measured, strict=True))
        stock = vectors[STOCK.name]
        self.rows = [
            Row(
                name,
                latency[name],
                throughput[name],
                peaks[name],
                (found - stock).abs().max().item(),
                torch.nn.functional.cosine_similarity(found, stock).min().item(),
            )
            for name, found in vectors.items()
        ]

    def _search(
        self, embedders: Mapping[str, Embedder], vectors: Mapping[str, torch.Tensor]
    ) -> None:
        for query in self.queries:
            self.nearest[query] = {}
            for name, embedder in embedders.items():
                similarity = vectors[name] @ embedder.embed([query])[0]
                best = similarity.topk(min(NEAREST, len(self.texts)))
                self.nearest[query][name] = list(
                    zip(best.values.tolist(), best.indices.tolist(), strict=True)
                )

    def _time_one_text(self, embedders: Mapping[str, Embedder]) -> dict[str, float]:
        """Seconds for a text of median length, from its tokens to its vector."""
        length = median_low(len(text) for text in self.texts)
        text = next(text for text in self.texts if len(text) == length)
        tokens = embedders[STOCK.name].tokens([text])
        self.timed_tokens = tokens["input_ids"].numel()
        calls = {
            name: partial(embedder.embed_tokens, tokens) for name, embedder in embedders.items()
        }
        interleaved(calls, rounds=3)  # warms up
        return interleaved(calls, rounds=3, seconds=self.seconds)

    def _embed_texts(
        self, embedders: Mapping[str, Embedder], begin: Callable[[str], None]
    ) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Vectors of all texts, and texts a second from tokens to vectors, batch by batch."""
        width = len(embedders)
        vectors: dict[str, dict[int, torch.Tensor]] = {name: {} for name in embedders}
        taken = dict.fromkeys(embedders, 0.0)

        def embed(name: str, rows: list[int], tokens: Mapping[str, torch.Tensor]) -> None:
            vectors[name].update(zip(rows, embedders[name].embed_tokens(tokens), strict=True))

        for number, rows in enumerate(batches(self.texts)):
            begin(f"embedding batch {number + 1} of {self.batches}, {width} models in turns")
            tokens = embedders[STOCK.name].tokens([self.texts[row] for row in rows])
            calls = {name: partial(embed, name, rows, tokens) for name in embedders}
            if number == 0:
                interleaved(calls)  # warms up
            for name, seconds in interleaved(calls, seconds=self.seconds / self.batches).items():
                taken[name] += seconds
        in_order = range(len(self.texts))
        return (
            {
                name: torch.stack([found[row] for row in in_order])
                for name, found in vectors.items()
            },
            {name: len(self.texts) / seconds for name, seconds in taken.items()},
        )
