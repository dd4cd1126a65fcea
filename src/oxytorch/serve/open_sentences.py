"""The service of a model that reads whole texts."""

from __future__ import annotations

import argparse
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
from .sentence_routes import embedding_router, rerank_router
from .sentences import Encoded, Reader, has_raw_scores, longest_text, pooling_of
from .tokens import Tokenizer

BATCH = 32
"""Texts of one call, where no option says another number."""


def sentence_service(
    folder: Path, kind: str, name: str, arguments: argparse.Namespace, metrics: Metrics
) -> Service:
    """The service of a model of sentences, or of a cross-encoder."""
    import transformers

    is_rerank = kind == "rerank"
    library: Any = transformers
    auto = library.AutoModelForSequenceClassification if is_rerank else library.AutoModel
    if is_rerank:
        refuse(arguments, "of models of sentences", "pooling")
    pooling = None if is_rerank else pooling_of(folder, arguments.pooling)
    inner = load_tokenizer(folder)
    try:
        model = auto.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
    except Exception as error:  # transformers raises many kinds for files that are no good
        raise ValueError(f"{folder} cannot be loaded by transformers: {error}") from error
    if is_rerank and model.config.num_labels != 1:
        raise ValueError(
            f"{folder}: expected a cross-encoder with one score, got {model.config.num_labels} "
            "labels; export it and serve the file of oxytorch.save"
        )
    dtype = torch.bfloat16 if arguments.dtype == "bf16" else None
    model = optimize(model.float().requires_grad_(False), dtype=dtype, inplace=True)
    padding = inner.pad_token_id or 0
    vocabulary = model.get_input_embeddings().num_embeddings
    longest = longest_text(folder, model.config, inner)

    def vectors(output: Any, mask: Tensor) -> Tensor:
        assert pooling is not None
        return pooling(output.last_hidden_state, mask)

    activation = nn.Identity() if is_rerank and has_raw_scores(model.config) else nn.Sigmoid()

    def scores(output: Any, mask: Tensor) -> Tensor:
        found: Tensor = activation(output.logits[:, 0].float())
        return found

    reader = Reader(model, padding, longest, vocabulary, scores if is_rerank else vectors)
    batcher: Batcher[Encoded, Tensor] = Batcher(
        reader,
        arguments.max_batch or BATCH,
        (0.0 if arguments.max_wait is None else arguments.max_wait) / 1e3,
        arguments.queue,
        arguments.timeout,
        metrics,
    )
    tokenizer = Tokenizer(inner)
    make = rerank_router if is_rerank else embedding_router
    router = make(reader, tokenizer, batcher, name, metrics)
    details = {"max_model_len": longest}
    return Service(name, kind, router, batcher, details)
