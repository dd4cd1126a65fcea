"""The service of a language model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..llm.decoder import Decoder, FusedDecoder, decoder_of
from ..llm.joint_steps import exact_rows
from ..llm.language_model import LanguageModel
from ..llm_command.folder import is_quantized, read_config
from ..llm_command.model import PreparedModel
from ..llm_command.options import GROUP_SIZE, PRECISIONS
from ..rewriting.memory import check_available
from .app import Service
from .engine import Engine
from .lanes import FusedLanes, lanes_of
from .language import Language, Limits
from .language_routes import language_router
from .logs import log
from .metrics import Metrics
from .tokens import Tokenizer

CONTEXT = 4096
"""Most tokens of a prompt and its completion, unless an option or the model says otherwise."""


def prepared_model(arguments: argparse.Namespace) -> nn.Module | LanguageModel:
    """The optimized model of a folder. Raises ValueError for what is none."""
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
    tokens = Tokenizer(tokenizer, context)
    tokens.check_template()
    _check_memory(decoder, arguments.slots, context)
    rows: int | None = None
    lanes = lanes_of(model, arguments.slots, context)
    if arguments.exact and isinstance(lanes, FusedLanes):
        most = min(lanes.rows, arguments.slots)
        with torch.inference_mode():
            rows = exact_rows(lanes.model, decoder.vocabulary, most)
        log.info("exact answers", extra={"fields": {"sequences_of_a_step": rows}})
    if not lanes.batched:
        log.warning(
            "this model is not known as a whole: its sequences step one after the other",
            extra={"fields": {"model": name}},
        )
    engine = Engine(
        lambda: lanes_of(model, arguments.slots, context, rows),
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
    language = Language(model, decoder.vocabulary, tokens, engine, limits)
    return Service(
        name,
        "language",
        language_router(language, name, metrics),
        engine,
        language,
        {"max_model_len": context},
    )


def _check_memory(decoder: Decoder, slots: int, context: int) -> None:
    """Raises MemoryError where the keys and values of all slots do not fit."""
    if isinstance(decoder, FusedDecoder):
        one = decoder.model.cache(1, 64).nbytes / 64
        check_available(
            "the server",
            int(one * context * slots),
            f"the keys and values of {slots} slots of {context} tokens (--slots, --context)",
        )


def _context(given: int | None, positions: int | None) -> int:
    if given is None:
        return CONTEXT if positions is None else min(CONTEXT, positions)
    if positions is not None and given > positions:
        raise ValueError(
            f"--context: the model has {positions} positions, got {given}; give at most that"
        )
    return given
