"""The application: routes of the model, of the server itself, and errors in one format."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from .. import __version__
from .access import App, Gate
from .errors import ApiError, failed
from .language import Language
from .logs import log
from .metrics import Metrics
from .page import PAGE, Figures
from .programs import ProgramCalls
from .sentence_routes import TextModel
from .web import check_name, error_response
from .worker import Worker


@dataclass
class Service:
    """A model behind routes.

    kind: "language", "embedding", "rerank" or "program".
    router: its routes.
    worker: runs the model; it is started before the first request and closed after the last one.
    model: what routes call.
    details: more of it for /v1/models.
    """

    name: str
    kind: str
    router: APIRouter
    worker: Worker
    model: TextModel | Language | ProgramCalls
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class State:
    """draining: no more requests are wanted, and those that run are finished."""

    draining: bool = False


def make_app(
    service: Service,
    metrics: Metrics,
    state: State,
    *,
    token: str | None,
    largest: int,
    is_local: bool,
) -> App:
    """The application of a service; see `access.Gate` for the rest."""
    app = FastAPI(title="oxytorch serve", version=__version__)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _refused_by_routes)
    app.add_exception_handler(Exception, _failed)
    app.include_router(service.router)
    app.include_router(_server_router(service, metrics, state))
    return Gate(app, metrics, token, largest, is_local)


def _server_router(service: Service, metrics: Metrics, state: State) -> APIRouter:
    router = APIRouter()
    figures = Figures(service.name, service.kind, metrics)
    created = int(time.time())
    model = {"id": service.name, "object": "model", "created": created, "owned_by": "oxytorch"}
    model |= {"kind": service.kind, **service.details}

    @router.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        if service.worker.is_alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "the thread of the model has ended"}, 503)

    @router.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> JSONResponse:
        if state.draining:
            return JSONResponse({"status": "shutting down"}, 503)
        return JSONResponse({"status": "ready"})

    @router.get("/metrics")
    async def shown_metrics() -> Response:
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        check_name(name, service.name)
        return model

    @router.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return PAGE.replace("DATA", figures.rows())

    return router


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _refused_by_routes(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no {request.method} {request.url.path}; GET /docs lists what there is"
    found = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    return error_response(found)


async def _failed(request: Request, error: Exception) -> Response:
    log.error("the server raised", exc_info=error)
    return error_response(failed(error))
