"""One run of the demo: loads, optimizes, embeds, times and searches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median_low

import torch

from .embedding import BATCH, TEXT, Embedder, load_model, load_tokenizer, read_texts
from .measure import interleaved, peak_memory
from .variants import OPTIMIZED, STOCK, VARIANTS

# Largest allowed difference of an entry of an fp32 vector of length 1: rounding in another order
# moves one by some 1e-7, a wrong formula by 1e-3 and more.
TOLERANCE = 1e-5
MOST_TEXTS = 2000
TIMED_BATCHES = 2
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

    rows: one per variant, in order. explanation: what `optimize` did. nearest: for each query and
    variant the rows of the nearest texts with their similarity, best first.
    """

    def __init__(self, text: Path | None, queries: Sequence[str], seconds: float) -> None:
        self.path = text or TEXT
        self.texts = read_texts(self.path, MOST_TEXTS)
        self.queries = list(queries)
        self.seconds = seconds
        self.steps = 5 + len(VARIANTS)
        self.parameters = 0
        self.timed_tokens = 0
        self.rows: list[Row] = []
        self.explanation = ""
        self.nearest: dict[str, dict[str, list[tuple[float, int]]]] = {}

    @property
    def faithful(self) -> bool:
        """Whether the optimized fp32 model answers as stock does."""
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

        vectors: dict[str, torch.Tensor] = {}
        for name, embedder in embedders.items():
            begin(f"embedding {len(self.texts)} texts: {name}")
            vectors[name] = embedder.embed(self.texts)
        self._search(embedders, vectors)

        begin("timing one text")
        latency = self._time_one_text(embedders)
        begin("timing batches")
        throughput = self._time_batches(embedders)
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
        return interleaved(calls, self.seconds / 4)

    def _time_batches(self, embedders: Mapping[str, Embedder]) -> dict[str, float]:
        """Texts a second over a few full batches, short texts to long ones, tokens to vectors."""
        by_length = sorted(self.texts, key=len)
        step = max(1, len(by_length) // (BATCH * TIMED_BATCHES))
        timed = by_length[::step][: BATCH * TIMED_BATCHES]
        tokens = [
            embedders[STOCK.name].tokens(timed[start : start + BATCH])
            for start in range(0, len(timed), BATCH)
        ]

        def all_batches(embedder: Embedder) -> None:
            for batch in tokens:
                embedder.embed_tokens(batch)

        calls = {name: partial(all_batches, embedder) for name, embedder in embedders.items()}
        taken = interleaved(calls, self.seconds * 3 / 4)
        return {name: len(timed) / seconds for name, seconds in taken.items()}
