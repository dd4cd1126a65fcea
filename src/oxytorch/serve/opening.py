"""From the MODEL of the command line to a service: what kind it is, and how it is opened."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from torch import nn

from ..files import load
from ..llm.decoder import FusedDecoder, decoder_of
from ..llm.language_model import LanguageModel
from ..llm_command.folder import is_quantized, load_tokenizer, read_config
from ..llm_command.model import PreparedModel
from ..llm_command.options import GROUP_SIZE, PRECISIONS
from ..rewriting.memory import check_available
from .app import Service
from .engine import Engine
from .lanes import lanes_of
from .language import Language, Limits
from .language_routes import language_router
from .logs import log
from .metrics import Metrics
from .tokens import Tokenizer

CONTEXT = 4096
"""Tokens of a prompt and its answer, where neither an option nor the model says another number."""


def open_service(arguments: argparse.Namespace, metrics: Metrics) -> Service:
    """The service of a model. Raises ValueError or OSError for what cannot be served."""
    path: Path = arguments.model
    name = arguments.name or path.stem or path.resolve().name
    if path.is_file():
        found = load(path)
        if isinstance(found, LanguageModel):
            refuse(arguments, "of folders", "weights", "kv_cache", "group_size")
            if arguments.tokenizer is None:
                raise ValueError(f"{path} has no tokenizer; give --tokenizer with its folder")
            return language_service(
                found, load_tokenizer(arguments.tokenizer), name, arguments, metrics
            )
        raise ValueError(f"{path}: programs are not served yet; give a language model")
    kind = kind_of(path)
    if kind == "language":
        tokenizer = load_tokenizer(arguments.tokenizer or path)
        return language_service(_prepared(arguments), tokenizer, name, arguments, metrics)
    raise ValueError(f"{path}: not served yet")


def kind_of(folder: Path) -> str:
    """ "language", "rerank" or "embedding", by the architecture that config.json names.

    Raises ValueError for what is no folder of a model, and for other architectures.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} is no model: expected a file of oxytorch.save, or a folder in Hugging "
            "Face's format, with config.json"
        )
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    names = [str(name) for name in (config.get("architectures") or [])]
    if any("CausalLM" in name or "LMHead" in name for name in names):
        return "language"
    if any(name.endswith("ForSequenceClassification") for name in names):
        return "rerank"
    if any("For" in name and not name.endswith("ForMaskedLM") for name in names):
        raise ValueError(
            f"{path}: expected a language model, a model of sentences or a cross-encoder, got the "
            f"architecture {', '.join(names)}; export it and serve the file of oxytorch.save"
        )
    return "embedding"


def refuse(arguments: argparse.Namespace, whose: str, *names: str) -> None:
    """Raises ValueError for options that this kind of model has no use for."""
    for name in names:
        if getattr(arguments, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} is an option {whose}, and {arguments.model} has no "
                "use for it; leave it out"
            )


def _prepared(arguments: argparse.Namespace) -> nn.Module | LanguageModel:
    path: Path = arguments.model
    if arguments.weights is not None and is_quantized(path, read_config(path)):
        raise ValueError(f"--weights: {path} is quantized already; leave the option out")
    prepared = PreparedModel.from_folder(
        path,
        arguments.weights or PRECISIONS["bf16"],
        arguments.kv_cache or "bf16",
        arguments.group_size or GROUP_SIZE,
        lambda line: log.info(line),
    )
    return prepared.model


def language_service(
    model: nn.Module | LanguageModel,
    tokenizer: Any,
    name: str,
    arguments: argparse.Namespace,
    metrics: Metrics,
) -> Service:
    """The service of a language model. Raises ValueError or MemoryError for wrong limits."""
    decoder = decoder_of(model)
    context = _context(arguments.context, decoder.positions)
    if isinstance(decoder, FusedDecoder):
        one = decoder.model.cache(1, 64).nbytes / 64
        check_available(
            "oxytorch serve",
            int(one * context * arguments.slots),
            f"the keys and values of {arguments.slots} slots of {context} tokens (--slots, "
            "--context)",
        )
    lanes = lanes_of(model, arguments.slots, context)
    if not lanes.batched:
        log.warning(
            "this model is not known as a whole: its sequences step one after the other",
            extra={"fields": {"model": name}},
        )
    engine = Engine(
        lambda: lanes_of(model, arguments.slots, context),
        arguments.slots,
        arguments.prompt_part,
        arguments.queue,
        metrics,
    )
    metrics.gauge("oxytorch_waiting", "Sequences that wait for a slot.", lambda: engine.waiting)
    metrics.gauge("oxytorch_running", "Sequences that have a slot.", lambda: engine.running)
    metrics.gauge("oxytorch_slots", "Slots for sequences.", lambda: engine.slots)
    new = min(arguments.max_new_tokens or context, context)
    limits = Limits(context, new, arguments.max_choices, arguments.timeout)
    language = Language(model, decoder.vocabulary, Tokenizer(tokenizer), engine, limits)
    return Service(
        name,
        "language",
        language_router(language, name, metrics),
        engine.start,
        engine.close,
        {"max_model_len": context},
    )


def _context(given: int | None, positions: int | None) -> int:
    if given is None:
        return CONTEXT if positions is None else min(CONTEXT, positions)
    if positions is not None and given > positions:
        raise ValueError(
            f"--context: the model was made for {positions} positions, got {given}; give at most "
            "that"
        )
    return given
