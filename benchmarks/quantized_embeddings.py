"""The sentence embeddings of `oxytorch demo` with 8-bit integers: speed, and how far they are from
float32 ones.

python benchmarks/quantized_embeddings.py [--observer NAME] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import time

import torch

import oxytorch
from oxytorch.demo.embedding import (
    BATCH,
    TEXT,
    Embedder,
    load_model,
    load_tokenizer,
    read_texts,
)
from oxytorch.quantization import Int8StaticActivationInt8Weight, quantize

CALIBRATION, QUERIES = 32, 200
"""Texts that ranges are found with, and texts for each of which the nearest other one is looked
for; the rest are searched."""


def main() -> None:
    """Print a line for each way of computing the embeddings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--observer", default="minmax")
    parser.add_argument("--symmetric", action="store_true", help="int8 activations")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    given = parser.parse_args()
    model, tokenizer = load_model(), load_tokenizer()
    texts = read_texts(TEXT, 2000)
    step = len(texts) // CALIBRATION
    own = Embedder(model, tokenizer)
    data = [dict(own.tokens([text])) for text in texts[::step][:CALIBRATION]]
    dtype: torch.dtype = getattr(torch, given.dtype)
    sample = dict(own.tokens(texts[:BATCH]))
    with torch.no_grad():
        began = time.perf_counter()
        config = Int8StaticActivationInt8Weight(given.symmetric, given.observer)
        quantized = quantize(model, data, config, dtype=None if dtype == torch.float32 else dtype)
        print(f"quantized in {time.perf_counter() - began:.1f} s with {len(data)} texts")
        plain = oxytorch.optimize(model, dtype=dtype, sample_input=sample, graph=True)
    ways = {"stock float32": model, f"optimized {given.dtype}": plain, "int8": quantized}
    wanted = own.embed(texts)
    for name, each in ways.items():
        embedder = Embedder(each, tokenizer)
        embedder.embed(texts)
        began = time.perf_counter()
        found = embedder.embed(texts)
        seconds = time.perf_counter() - began
        cosine = (found * wanted).sum(-1)
        nearest = [_nearest(vectors) for vectors in (found, wanted)]
        share = (nearest[0] == nearest[1]).float().mean()
        print(
            f"{name:<20} {len(texts) / seconds:7.0f} texts/s   cosine to float32: mean "
            f"{cosine.mean():.4f}, least {cosine.min():.4f}   same nearest text: {share:.1%}"
        )


def _nearest(vectors: torch.Tensor) -> torch.Tensor:
    """Which of the other texts is nearest to each query."""
    return (vectors[:QUERIES] @ vectors[QUERIES:].T).argmax(-1)


if __name__ == "__main__":
    main()
