"""What all routes share in one API process, and the marks that a request carries through them.

The request id is minted at the first look and becomes the id of the order; headers that every answer has are added
where every answer passes, also Litestar's own errors.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from litestar.connection import ASGIConnection
from litestar.datastructures import MutableScopeHeaders
from sqlalchemy import Engine

from billing.ids import uuid7
from billing.keys import Principal
from service import metrics
from service.auth import Keys
from service.dispatch import Dispatch
from service.refusals import Refusals
from service.settings import Settings
from service.telemetry import Tracing

if TYPE_CHECKING:
    from litestar.types import Message, Scope

Connection = ASGIConnection[Any, Any, Any, Any]  # Litestar's type parameters carry nothing of ours

_REQUEST_ID: Final = "pennyweight.request_id"
_STARTED: Final = "pennyweight.started"
_PRINCIPAL: Final = "pennyweight.principal"
_UNTEMPLATED: Final = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """The parts of one API process."""

    settings: Settings
    database: Engine
    keys: Keys
    refusals: Refusals
    tracing: Tracing
    dispatch: Dispatch


def begin(scope: Scope) -> None:
    """The clock of the request starts, or starts anew."""
    _marks(scope)[_STARTED] = time.time(), time.monotonic_ns()


def started(scope: Scope) -> tuple[float, int]:
    """(UTC seconds, monotonic nanoseconds)"""
    if _STARTED not in _marks(scope):
        begin(scope)
    stamps: tuple[float, int] = _marks(scope)[_STARTED]
    return stamps


def request_id(scope: Scope) -> UUID:
    found: UUID = _marks(scope).setdefault(_REQUEST_ID, uuid7())
    return found


def remember(scope: Scope, principal: Principal) -> None:
    _marks(scope)[_PRINCIPAL] = principal


def principal_of(scope: Scope) -> Principal | None:
    principal: Principal | None = _marks(scope).get(_PRINCIPAL)
    return principal


async def before_send(message: Message, scope: Scope) -> None:
    """Litestar calls this for every message of every answer."""
    if message["type"] != "http.response.start":
        return
    headers = MutableScopeHeaders.from_message(message)
    headers["x-request-id"] = str(request_id(scope))
    _, started_ns = started(scope)
    headers["openai-processing-ms"] = str((time.monotonic_ns() - started_ns) // 1_000_000)
    headers["openai-version"] = "2020-10-01"
    metrics.HTTP.labels(scope.get("path_template", _UNTEMPLATED), message["status"]).inc()


def _marks(scope: Scope) -> dict[str, Any]:
    """Litestar copies its own state per app; this is the request's."""
    marks: dict[str, Any] = scope.setdefault("state", {})
    return marks
