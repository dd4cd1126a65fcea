"""The service of a model that reads whole texts."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..llm_command.folder import load_tokenizer
from ..optimize import optimize
from .app import Service
from .batcher import Batcher
from .metrics import Metrics
from .options import refuse
from .sentence_routes import TextModel, embedding_router, rerank_router
from .sentences import Encoded, Pooling, Reader, has_raw_scores, longest_text, pooling_of
from .tokens import Tokenizer

BATCH = 32
"""Texts of one call, where no option says another number."""


def sentence_service(
    folder: Path, kind: str, name: str, arguments: argparse.Namespace, metrics: Metrics
) -> Service:
    """The service of a model of sentences, or of a cross-encoder (kind "rerank")."""
    is_rerank = kind == "rerank"
    if is_rerank:
        refuse(arguments, "of models of sentences", "pooling")
    pooling = None if is_rerank else pooling_of(folder, arguments.pooling)
    inner = load_tokenizer(folder)
    model = _opened(folder, is_rerank)
    finish = _scores(model.config) if pooling is None else _vectors(pooling)
    dtype = torch.bfloat16 if arguments.dtype == "bf16" else None
    model = optimize(model.float().requires_grad_(False), dtype=dtype, inplace=True)
    longest = longest_text(folder, model.config, inner)
    vocabulary = model.get_input_embeddings().num_embeddings
    reader = Reader(model, inner.pad_token_id or 0, longest, vocabulary, finish)
    batcher: Batcher[Encoded, Tensor] = Batcher(
        reader,
        arguments.max_batch or BATCH,
        (0.0 if arguments.max_wait is None else arguments.max_wait) / 1e3,
        arguments.queue,
        arguments.timeout,
        metrics,
    )
    make = rerank_router if is_rerank else embedding_router
    served = TextModel(name, reader, Tokenizer(inner, longest), batcher, metrics)
    return Service(name, kind, make(served), batcher, served, {"max_model_len": longest})


def _opened(folder: Path, is_rerank: bool) -> Any:
    """The model of transformers in a folder. Raises ValueError for one that cannot be served."""
    import transformers

    library: Any = transformers
    auto = library.AutoModelForSequenceClassification if is_rerank else library.AutoModel
    try:
        model = auto.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
    except Exception as error:  # transformers raises many kinds for files that are no good
        raise ValueError(f"{folder} cannot be loaded by transformers: {error}") from error
    if is_rerank and model.config.num_labels != 1:
        raise ValueError(
            f"{folder}: expected a cross-encoder with one score, got {model.config.num_labels} "
            "labels; export it and serve the file of oxytorch.save"
        )
    return model


def _vectors(pooling: Pooling) -> Callable[[Any, Tensor], Tensor]:
    return lambda output, mask: pooling(output.last_hidden_state, mask)


def _scores(config: Any) -> Callable[[Any, Tensor], Tensor]:
    activation = nn.Identity() if has_raw_scores(config) else nn.Sigmoid()

    def scores(output: Any, mask: Tensor) -> Tensor:
        found: Tensor = activation(output.logits[:, 0].float())
        return found

    return scores
