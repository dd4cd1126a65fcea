"""`oxytorch llm perplexity`: what a text costs in every format of weights and cache."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oxytorch.command_line import positive, words
from oxytorch.llm import LanguageModel
from oxytorch.llm_command.folder import is_quantized, load_model, load_tokenizer, read_config
from oxytorch.llm_command.options import (
    PRECISIONS,
    Precision,
    add_count,
    add_group_size,
    add_verb,
    output_file,
    precision,
    text_of,
)

STOCK = "float32"
"""The row of the model as it is stored, run by transformers in float32."""

AS_STORED = Precision("as stored")
"""The row of a folder whose weights are quantized already."""

DEFAULT_ROWS = f"{STOCK},bf16,int8,fp8,int4,nf4"
CALIBRATION_TOKENS = 32_768

DESCRIPTION = """\
Measure how well a model predicts a text: its perplexity, in several formats of weights and cache.

Every format reads the same tokens in the same windows. Changes are those from the first row; the
number behind +- is their standard error, from the differences token by token.
"""

EXAMPLES = """\
examples:
  oxytorch llm perplexity ./model --text held_out.txt
  oxytorch llm perplexity ./model --text held_out.txt --weights bf16,int4 --calibration train.txt
  oxytorch llm perplexity ./model --text held_out.txt --kv-cache bf16,int8 --json result.json
"""


def add_parser(verbs: Any, name: str, summary: str) -> None:
    """Adds the verb with its options."""
    parser = add_verb(verbs, name, summary, DESCRIPTION, EXAMPLES)
    parser.add_argument("folder", type=Path, metavar="MODEL_DIR", help="folder with config.json")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text")
    parser.add_argument(
        "--weights",
        type=_rows,
        metavar="A,B,...",
        help=f"{STOCK} (the model as stored), {', '.join(PRECISIONS)} (default: {DEFAULT_ROWS}; "
        "a folder that is quantized is measured as it is)",
    )
    parser.add_argument(
        "--kv-cache",
        type=_caches,
        default=("bf16",),
        metavar="A,B",
        help="bf16, int8 or both (default: bf16)",
    )
    add_group_size(parser)
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="also quantize 4-bit weights so that they keep what layers compute on this text",
    )
    parser.add_argument(
        "--window", type=positive, metavar="N", help="tokens read at a time (default: 2048 or less)"
    )
    parser.add_argument(
        "--stride", type=positive, metavar="N", help="tokens between windows (default: the window)"
    )
    add_count(parser, "--tokens", 32_768, "most tokens")
    parser.add_argument("--threads", type=positive, metavar="N", help="threads (default: torch's)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="file for the results")


def _rows(text: str) -> tuple[Precision | None, ...]:
    """Precisions of words separated by commas; None is the stock model."""
    return tuple(None if word == STOCK else precision(word, also=STOCK) for word in words(text))


def _caches(text: str) -> tuple[str, ...]:
    caches = words(text)
    for word in caches:
        if word not in ("bf16", "int8"):
            raise argparse.ArgumentTypeError(f"unknown cache {word!r}; choices: bf16, int8")
    return caches


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints; raises ValueError for a mistake in the command or the folder."""
    config = read_config(arguments.folder)
    rows = _chosen(arguments, is_quantized(arguments.folder, config))
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    tokenizer = load_tokenizer(arguments.folder)
    tokens = text_tokens(tokenizer, arguments.text, "--text")[: arguments.tokens + 1]
    samples = None
    positions = config.get("max_position_embeddings") or 2048
    window = arguments.window or min(2048, positions)
    if arguments.calibration is not None:
        read = text_tokens(tokenizer, arguments.calibration, "--calibration")
        samples = calibration_batches(read, min(window, 512))

    from oxytorch.benchmark.core.kept import keeping
    from oxytorch.benchmark.core.results import new_run
    from oxytorch.benchmark.report.terminal import show_run

    settings = {
        "folder": arguments.folder.name,
        "text": arguments.text.name,
        "tokens": len(tokens) - 1,
        "window": window,
        "stride": arguments.stride or window,
        "group_size": arguments.group_size,
        "threads": torch.get_num_threads(),
    }
    result = new_run("perplexity", shlex.join(["oxytorch", *sys.argv[1:]]), settings)
    first: Tensor | None = None
    plan = {
        f"{STOCK if row is None else row.name}, cache {cache}{', calibrated' * calibrated}": (
            row,
            cache,
            samples if calibrated else None,
        )
        for row, cache, calibrated in _plan(rows, arguments.kv_cache, samples is not None)
    }
    with keeping(result, list(plan), [] if arguments.json is None else [arguments.json]) as kept:
        for name, (row, cache, calibration) in plan.items():
            model, entry = _prepared(arguments, row, cache, calibration)
            losses = _losses(model, tokens, window, arguments.stride, str(entry["label"]))
            first = losses if first is None else first
            entry |= _figures(losses, first)
            kept.add({**settings, **entry})
            kept.finish(name)
    show_run(result)
    if arguments.json is not None:
        print(f"wrote {arguments.json}")
    return 0


def text_tokens(tokenizer: Any, path: Path, option: str) -> Tensor:
    """The tokens of a file, int64 [tokens]; raises ValueError for a file that holds no text."""
    found = tokenizer(text_of(path, option))["input_ids"]
    if len(found) < 2:
        raise ValueError(f"{option}: expected at least 2 tokens in {path}, got {len(found)}")
    return torch.tensor(found, dtype=torch.int64)


def calibration_batches(tokens: Tensor, length: int) -> list[Tensor]:
    """Batches int64 [8 or fewer, length] that are spread evenly over a text."""
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    if len(rows) == 0:
        rows = tokens[None]
    wanted = max(1, CALIBRATION_TOKENS // length)
    chosen = torch.linspace(0, len(rows) - 1, min(wanted, len(rows))).round().long()
    return [rows[chosen[begin : begin + 8]] for begin in range(0, len(chosen), 8)]


def _chosen(arguments: argparse.Namespace, quantized: bool) -> tuple[Precision | None, ...]:
    """The formats of weights to measure; raises ValueError for what a quantized folder lacks."""
    if not quantized:
        rows = _rows(DEFAULT_ROWS) if arguments.weights is None else arguments.weights
        if not rows:
            raise ValueError("--weights: expected at least one format, got none")
        return tuple(rows)
    for option in ("weights", "calibration"):
        if getattr(arguments, option) is not None:
            raise ValueError(
                f"--{option}: {arguments.folder} is quantized already and is measured as it is; "
                "leave the option out, or give a folder with plain weights"
            )
    return (AS_STORED,)


def _plan(
    rows: Sequence[Precision | None], caches: Sequence[str], calibrated: bool
) -> list[tuple[Precision | None, str, bool]]:
    """(format of weights, of the cache, whether calibrated) of each row."""
    found: list[tuple[Precision | None, str, bool]] = []
    for row in rows:
        if row is None:
            found.append((None, "float32", False))
            continue
        for cache in caches:
            found.append((row, cache, False))
            if calibrated and row.weights in ("int4", "nf4"):
                found.append((row, cache, True))
    return found


def _prepared(
    arguments: argparse.Namespace,
    row: Precision | None,
    cache: str,
    samples: list[Tensor] | None,
) -> tuple[nn.Module | LanguageModel, dict[str, object]]:
    """The model in one format, and how it is called."""
    entry: dict[str, object] = {
        "weights": STOCK if row is None else row.name,
        "kv_cache": cache,
        "calibrated": samples is not None,
        "label": STOCK if row is None else _label(row, cache, samples is not None),
    }
    if row is None:
        return load_model(arguments.folder, torch.float32), entry
    from oxytorch import llm
    from oxytorch.llm_command.model import PreparedModel
    from oxytorch.quantization import quantize_

    model = load_model(arguments.folder)
    if samples is None:
        prepared = PreparedModel.from_model(model, row, cache, arguments.group_size)
        return prepared.model, entry
    config = _config(row, arguments.group_size)
    quantize_(model, config, filter=lambda path, module: True, calibration=samples)
    return llm.optimize(model, torch.bfloat16, kv_cache=cache, inplace=True), entry


def _config(row: Precision, group_size: int) -> Any:
    """The configuration of weights of 4 bits."""
    from oxytorch.quantization import Int4Weight, Int8DynamicActivationInt4Weight, NF4Weight

    if row.weights == "nf4":
        return NF4Weight(group_size)
    return (Int4Weight if row.activation_dtype is None else Int8DynamicActivationInt4Weight)(
        group_size
    )


def _label(row: Precision, cache: str, calibrated: bool) -> str:
    parts = [row.name]
    if calibrated:
        parts.append("calibrated")
    if cache != "bf16":
        parts.append(f"{cache} cache")
    return ", ".join(parts)


def _losses(
    model: nn.Module | LanguageModel, tokens: Tensor, window: int, stride: int | None, label: str
) -> Tensor:
    from oxytorch.llm.perplexity import token_losses

    begin = time.perf_counter()
    said = begin

    def tell(done: int, all: int) -> None:
        nonlocal said
        now = time.perf_counter()
        if 0 < done < all and now - said > 10:
            said = now
            left = (now - begin) / done * (all - done)
            _tell(f"{label}: {done} of {all} windows, {left:.0f} s left")

    _tell(f"{label}: {len(tokens) - 1} tokens")
    return token_losses(model, tokens, window, stride, progress=tell)


def _figures(losses: Tensor, first: Tensor) -> dict[str, float]:
    """Perplexity, and its change from the first row with the standard error, as fractions."""
    value = math.exp(losses.double().mean().item())
    gaps = (losses - first).double()
    change = math.expm1(gaps.mean().item())
    error = gaps.std().item() / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
    return {"perplexity": value, "change": change, "change_error": error * (1 + change)}


def _tell(line: str) -> None:
    print(f"oxytorch llm perplexity: {line}", file=sys.stderr, flush=True)
