"""The ASGI application: its parts are made when it starts and closed in order when it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

import msgspec
import structlog
from litestar import Litestar, MediaType, Request, Response, get
from litestar.datastructures import State
from litestar.exceptions import HTTPException

from billing.database import open_database
from engine.protocol import Settlement
from service import admin, docs, health, inference, login, logs, metrics
from service.auth import Keys
from service.dispatch import Dispatch
from service.front import Front, before_send, principal_of, request_id
from service.generation import Generation
from service.refusals import Refusals
from service.settings import Settings
from service.telemetry import Tracing
from service.wire.errors import ApiError, internal

log = structlog.get_logger()

_POOL: Final = 4  # connections to Postgres, for keys, refusals and the admin API
_MESSAGES: Final = {
    400: "The request cannot be understood: its body or a parameter is missing or malformed.",
    404: "Unknown request URL. The API lives under /v1; /docs describes it.",
    405: "This URL does not take this method.",
    413: "The request body is too large.",
}


def create_app(settings: Settings) -> Litestar:
    front = _front(settings)
    return Litestar(
        [
            *inference.routes(front),
            *health.routes(front),
            admin.routes(front),
            login.routes(front),
            docs.asset,
            _metrics,
        ],
        request_class=inference.WireRequest,
        request_max_body_size=settings.max_body_bytes,
        exception_handlers={ApiError: _refusing(front), HTTPException: _http_error, Exception: _crash},
        before_send=[before_send],
        lifespan=[lambda _: _life(front)],
        openapi_config=docs.openapi(),
        logging_config=None,
        state=State({"front": front}),
    )


def _front(settings: Settings) -> Front:
    database = open_database(settings.database_url, pool_size=_POOL)
    refusals = Refusals(database)

    def observe(generation: Generation, record: Settlement) -> None:
        metrics.observe(record)
        tracing.settle(generation, record)
        logs.request_end(record, len(generation.facts.attempts))

    dispatch = Dispatch(settings, observe=observe)
    tracing = Tracing(dispatch.boot)
    return Front(
        settings=settings,
        database=database,
        keys=Keys(database, settings),
        refusals=refusals,
        tracing=tracing,
        dispatch=dispatch,
    )


@contextlib.asynccontextmanager
async def _life(front: Front) -> AsyncIterator[None]:
    flusher = asyncio.create_task(front.refusals.run())
    try:
        async with front.dispatch:
            log.info("api process started", boot=front.dispatch.boot)
            yield
    finally:
        flusher.cancel()
        await asyncio.gather(flusher, return_exceptions=True)
        await front.refusals.flush()
        await asyncio.to_thread(front.tracing.close)
        front.database.dispose()
        log.info("api process ended", boot=front.dispatch.boot)


@get("/metrics", media_type="text/plain; version=0.0.4", include_in_schema=False)
async def _metrics() -> bytes:
    return await asyncio.to_thread(metrics.page)


_HttpRequest = Request[object, object, State]


def _refusing(front: Front) -> Callable[[_HttpRequest, ApiError], Response[bytes]]:
    def handler(request: _HttpRequest, error: ApiError) -> Response[bytes]:
        if error.refused and request.scope["path"].startswith("/v1/"):
            principal = principal_of(request.scope)
            tenant_id, key_id = (principal.tenant_id, principal.key_id) if principal else (None, None)
            front.refusals.add(error.cause, tenant_id, key_id)
            metrics.REFUSALS.labels(error.cause).inc()
        return _answer(error)

    return handler


def _http_error(_: _HttpRequest, error: HTTPException) -> Response[bytes]:
    """Litestar's own errors, in OpenAI's body and without what they may quote."""
    message = _MESSAGES.get(error.status_code)
    if message is None:
        return _answer(internal())
    answer = ApiError(error.status_code, message, type="invalid_request_error", headers=error.headers)
    return _answer(answer)


def _crash(request: _HttpRequest, error: Exception) -> Response[bytes]:
    log.error("request crashed", request_id=str(request_id(request.scope)), error=type(error).__name__, exc_info=error)
    return _answer(internal())


def _answer(error: ApiError) -> Response[bytes]:
    return Response(
        msgspec.json.encode(error.body), status_code=error.status, headers=error.headers, media_type=MediaType.JSON
    )
