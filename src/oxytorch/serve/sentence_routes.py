"""The routes of models that read whole texts."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass
from typing import Any

import numpy
from fastapi import APIRouter, Request
from torch import Tensor

from .batcher import Batcher
from .errors import ApiError
from .language import separate
from .metrics import Metrics
from .requests import Embeddings, Rerank, schema
from .sentences import Encoded, Reader, encoded_tokens
from .tokens import Tokenizer
from .web import body_of, check_name, client_of, unless_gone

MOST_TEXTS = 2048
"""Texts of one request, as OpenAI has it."""


@dataclass(frozen=True)
class TextModel:
    """A model of whole texts behind HTTP.

    name: what clients call it.
    batcher: calls the reader on texts of several requests.
    """

    name: str
    reader: Reader
    tokenizer: Tokenizer
    batcher: Batcher[Encoded, Tensor]
    metrics: Metrics


def embedding_router(model: TextModel) -> APIRouter:
    """POST /v1/embeddings."""
    router = APIRouter()

    @router.post("/v1/embeddings", openapi_extra=schema(Embeddings))
    async def embeddings(request: Request) -> dict[str, Any]:
        body = await body_of(request, Embeddings)
        check_name(body.model, model.name)
        texts = await asyncio.to_thread(_texts, body, model)
        work = model.batcher.results(texts, body.user or client_of(request))
        vectors = await unless_gone(request, work, model.metrics)
        width = len(vectors[0])
        if body.dimensions not in (None, width):
            raise ApiError(400, f"this model's vectors have {width} dimensions", param="dimensions")
        tokens = sum(len(text["input_ids"]) for text in texts)
        model.metrics.tokens.add("prompt", value=tokens)
        data = [
            {"object": "embedding", "index": index, "embedding": _shown(vector, body)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": model.name, "usage": usage}

    return router


def _texts(body: Embeddings, model: TextModel) -> list[Encoded]:
    given = separate(body.input)
    if not 0 < len(given) <= MOST_TEXTS:
        raise ApiError(400, f"expected 1 to {MOST_TEXTS} texts, got {len(given)}", param="input")
    if any(not text for text in given):
        raise ApiError(400, "input has an empty text", param="input")
    return [
        model.reader.check(
            model.tokenizer.encode_whole(text)
            if isinstance(text, str)
            else encoded_tokens(model.tokenizer, text),
            "input",
        )
        for text in given
    ]


def _shown(vector: Tensor, body: Embeddings) -> str | list[float]:
    if body.encoding_format == "float":
        found: list[float] = vector.tolist()
        return found
    return base64.b64encode(vector.numpy().astype(numpy.dtype("<f4")).tobytes()).decode()


def rerank_router(model: TextModel) -> APIRouter:
    """POST /v1/rerank and /rerank."""
    router = APIRouter()

    @router.post("/v1/rerank", openapi_extra=schema(Rerank))
    @router.post("/rerank", openapi_extra=schema(Rerank), include_in_schema=False)
    async def rerank(request: Request) -> dict[str, Any]:
        body = await body_of(request, Rerank)
        check_name(body.model, model.name)
        documents = [_document(each) for each in body.documents]
        if len(documents) > MOST_TEXTS:
            raise ApiError(400, f"expected at most {MOST_TEXTS} documents", param="documents")
        pairs = await asyncio.to_thread(_pairs, body.query, documents, model)
        work = model.batcher.results(pairs, client_of(request))
        scores = [float(score) for score in await unless_gone(request, work, model.metrics)]
        tokens = sum(len(pair["input_ids"]) for pair in pairs)
        model.metrics.tokens.add("prompt", value=tokens)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        results: list[dict[str, Any]] = []
        for index in order:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if body.return_documents:
                result["document"] = {"text": documents[index]}
            results.append(result)
        return {"model": model.name, "results": results, "usage": {"total_tokens": tokens}}

    return router


def _document(given: str | dict[str, Any]) -> str:
    text = given if isinstance(given, str) else given.get("text")
    if not isinstance(text, str):
        raise ApiError(400, "expected each document to be text or to have text", param="documents")
    return text


def _pairs(query: str, documents: list[str], model: TextModel) -> list[Encoded]:
    pairs = (model.tokenizer.encode_pair(query, document) for document in documents)
    what = "the query and a document have"
    return [model.reader.check(pair, "documents", what) for pair in pairs]
