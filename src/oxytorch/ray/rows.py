"""A served model on rows of a dataset, in the process that asks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch

from ..serve.answers import Form, whole
from ..serve.errors import ApiError
from ..serve.language import Language
from ..serve.logs import set_up
from ..serve.metrics import Metrics
from ..serve.opening import open_service
from ..serve.programs import ProgramCalls
from ..serve.requests import Completion
from ..serve.sentence_routes import TextModel
from .options import parsed

Batch = dict[str, Any]
"""Columns of as many rows each: arrays of numbers, or lists."""

_Result = TypeVar("_Result")
FOREVER = 1e8
"""Seconds that rows may wait: nobody waits for one of them."""


class Rows:
    """Calls a model on batches of rows: a class for `Dataset.map_batches`.

    model and options: as for `application`.

    columns: those that the model reads: a text for language models and models of sentences, a query
        and a document for cross-encoders, the inputs of a program (None: the columns of its inputs'
        names).
    request: for language models, fields of a completion such as `max_tokens`; `temperature` is 0
        where it says no other. A row's result is the one that it has alone.

    A batch gets the columns `embedding`, `score`, `answer` and `finish_reason`, or `output_0` and
    so on, and `error`: None, or why this row has no result (a text that is too long). Columns that
    the dataset has already under these names are an error.
    """

    def __init__(
        self,
        model: str | Path,
        columns: Sequence[str] | None = None,
        request: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        given = {"timeout": FOREVER, **(options or {})}
        arguments = parsed(model, given)
        set_up("warning")
        self._service = open_service(arguments, Metrics())
        self._columns = _columns(self._service.kind, self._service.model, columns)
        self._request = {"temperature": 0.0, **(request or {})}
        if request is not None and self._service.kind != "language":
            raise ValueError(f"request: is for language models, not a {self._service.kind} model")
        self._service.worker.start()

    def __call__(self, batch: Batch) -> Batch:
        """The batch with results. Raises what the model raises but for mistakes of single rows."""
        for name in self._columns:
            if name not in batch:
                raise ValueError(f"columns: there is no {name!r}; there are {', '.join(batch)}")
        given = [batch[name] for name in self._columns]
        model = self._service.model
        if isinstance(model, ProgramCalls):
            found = _outputs(model, given)
        elif isinstance(model, TextModel):
            found = asyncio.run(_read(model, given, self._service.kind))
        else:
            found = asyncio.run(self._written(model, given[0]))
        if taken := found.keys() & batch.keys():
            raise ValueError(f"the dataset has a column {taken.pop()!r} already; rename it")
        return {**batch, **found}

    def close(self) -> None:
        """Ends the model's thread."""
        self._service.worker.close()

    async def _written(self, model: Language, prompts: Sequence[Any]) -> Batch:
        form = Form(False, self._service.name, model.tokenizer)

        async def answer(prompt: Any) -> dict[str, Any]:
            text = prompt if isinstance(prompt, str) else [int(token) for token in prompt]
            body = Completion(model=self._service.name, prompt=text, **self._request)
            found = await whole(await model.complete(body, "rows"), form)
            choice: dict[str, Any] = found["choices"][0]
            return choice

        # More than the engine's slots at a time, so that none is empty, and fewer than its queue.
        limit = asyncio.Semaphore(model.engine.slots + min(model.engine.slots, model.engine.limit))

        async def limited(prompt: Any) -> dict[str, Any]:
            async with limit:
                return await answer(prompt)

        found, errors = await _each([limited(prompt) for prompt in prompts])
        return {
            "answer": [None if each is None else each["text"] for each in found],
            "finish_reason": [None if each is None else each["finish_reason"] for each in found],
            "error": errors,
        }


def _columns(kind: str, model: Any, given: Sequence[str] | None) -> list[str]:
    """The columns to read, as many as the model takes."""
    if isinstance(model, ProgramCalls):
        wanted = len(model.varying)
        columns = [each.name for each in model.varying] if given is None else list(given)
    else:
        wanted = 2 if kind == "rerank" else 1
        columns = (
            (["query", "document"] if wanted == 2 else ["text"]) if given is None else [*given]
        )
    if len(columns) != wanted:
        raise ValueError(f"columns: expected {wanted} for a {kind} model, got {columns}")
    return columns


async def _each(
    calls: Sequence[Coroutine[Any, Any, _Result]],
) -> tuple[list[_Result | None], list[str | None]]:
    """Results of calls, and the mistakes of rows that have none."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    results: list[_Result | None] = []
    errors: list[str | None] = []
    for each in found:
        is_mistake = isinstance(each, ApiError) and each.status < 500
        if isinstance(each, BaseException) and not is_mistake:
            raise each
        results.append(None if isinstance(each, BaseException) else each)
        errors.append(str(each) if isinstance(each, BaseException) else None)
    return results, errors


async def _read(model: TextModel, given: Sequence[Sequence[str]], kind: str) -> Batch:
    """Vectors, or scores. Texts of about the same length are read together."""
    kept: list[tuple[int, dict[str, list[int]]]] = []
    errors: list[str | None] = [None] * len(given[0])
    tokenizer = model.tokenizer
    encode = tokenizer.encode_pair if kind == "rerank" else tokenizer.encode_whole
    for row, texts in enumerate(zip(*given, strict=True)):
        try:
            encode = (
                model.tokenizer.encode_pair if kind == "rerank" else model.tokenizer.encode_whole
            )
            kept.append((row, model.reader.check(encode(*map(str, texts)), "the row")))
        except ApiError as error:
            errors[row] = str(error)
    kept.sort(key=lambda each: len(each[1]["input_ids"]))
    results = await model.batcher.results([each for _, each in kept], "rows") if kept else []
    name = "score" if kind == "rerank" else "embedding"
    found: list[Any] = [None] * len(errors)
    for (row, _), result in zip(kept, results, strict=True):
        found[row] = float(result) if kind == "rerank" else result.numpy()
    return {name: found, "error": errors}


def _outputs(calls: ProgramCalls, given: Sequence[Any]) -> Batch:
    """The results of a program, whose rows are those of its inputs."""
    rows = len(given[0])
    tensors = [
        torch.as_tensor(numpy.stack([numpy.asarray(each) for each in column]), device="cpu")
        for column in given
    ]
    expected = [getattr(each, "dtype", torch.int64) for each in calls.varying]
    with torch.inference_mode():
        results = calls.one(
            tuple(each.to(dtype) for each, dtype in zip(tensors, expected, strict=True))
        )
    found: Batch = {}
    for number, result in enumerate(results):
        if result.dim() == 0 or len(result) != rows:
            raise ValueError(
                f"output_{number} of the program has the shape {list(result.shape)} for {rows} "
                "rows; export one whose results have the rows of its inputs"
            )
        plain = result.float() if result.dtype == torch.bfloat16 else result
        found[f"output_{number}"] = plain.numpy()
    return {**found, "error": [None] * rows}
