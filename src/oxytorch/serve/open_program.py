"""The service of a program, and its routes."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from torch import Tensor

from .. import __version__
from ..program.model import ProgramModel, TensorInput
from .app import Service
from .batcher import Batcher
from .errors import ApiError
from .metrics import Metrics
from .programs import NAMES, Call, Inference, ProgramCalls, call_of, shown
from .requests import schema
from .web import body_of, check_name, client_of, unless_gone


def program_service(
    model: ProgramModel, name: str, arguments: argparse.Namespace, metrics: Metrics
) -> Service:
    """The service of a program. Raises ValueError for one that the protocol cannot call."""
    most = arguments.max_batch or 1
    calls = ProgramCalls(model, is_joined=most > 1)
    for each in calls.varying:
        if isinstance(each, TensorInput) and each.dtype not in NAMES:
            raise ValueError(f"the input {each.name} is of {each.dtype}, which JSON cannot carry")
    if most > 1 and not calls.can_join():
        raise ValueError(
            "--max-batch: expected a program whose inputs have any number of rows; export it with "
            "dynamic_shapes for the first dimension of each"
        )
    batcher: Batcher[Call, list[Tensor] | ApiError] = Batcher(
        lambda given: _each(calls, given),
        most,
        (arguments.max_wait or 0.0) / 1e3,
        arguments.queue,
        arguments.timeout,
        metrics,
    )
    router = _router(calls, batcher, name, metrics)
    return Service(name, "program", router, batcher, calls)


def _each(calls: ProgramCalls, given: Sequence[Call]) -> list[list[Tensor] | ApiError]:
    """The results of calls, or what each is refused with: one's mistake is no other's."""
    try:
        return [*calls(given)]
    except ApiError as error:
        if len(given) == 1:
            return [error]
    found: list[list[Tensor] | ApiError] = []
    for call in given:
        try:
            found.append(calls.one(call))
        except ApiError as error:
            found.append(error)
    return found


def _router(
    calls: ProgramCalls,
    batcher: Batcher[Call, list[Tensor] | ApiError],
    name: str,
    metrics: Metrics,
) -> APIRouter:
    router = APIRouter()

    @router.get("/v2")
    async def server() -> dict[str, Any]:
        return {"name": "oxytorch", "version": __version__, "extensions": []}

    @router.get("/v2/models/{model}")
    async def metadata(model: str) -> dict[str, Any]:
        check_name(model, name)
        inputs = [
            {
                "name": each.name,
                "datatype": NAMES[each.dtype] if isinstance(each, TensorInput) else "INT64",
                "shape": [-1 if size is None else size for size in each.shape]
                if isinstance(each, TensorInput)
                else [1],
            }
            for each in calls.varying
        ]
        return {"name": name, "versions": ["1"], "platform": "oxytorch", "inputs": inputs}

    @router.post("/v2/models/{model}/infer", openapi_extra=schema(Inference))
    async def infer(model: str, request: Request) -> dict[str, Any]:
        check_name(model, name)
        body = await body_of(request, Inference)
        call = await asyncio.to_thread(call_of, body.inputs, calls.varying)
        work = batcher.results([call], client_of(request))
        (found,) = await unless_gone(request, work, metrics)
        if isinstance(found, ApiError):
            raise found
        outputs = [shown(number, result) for number, result in enumerate(found)]
        if body.outputs is not None:
            wanted = {each.name for each in body.outputs}
            unknown = wanted - {output["name"] for output in outputs}
            if unknown:
                raise ApiError(400, f"there is no output {unknown.pop()!r}", param="outputs")
            outputs = [output for output in outputs if output["name"] in wanted]
        answer = {"model_name": name, "model_version": "1", "outputs": outputs}
        return answer if body.id is None else {**answer, "id": body.id}

    return router
