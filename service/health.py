"""Is it alive, is it ready, and which part is not.

Live: this process answers. Ready: a request would be served. Every part is looked at anew, at most once a second.

* database: away, known keys are still served, for key_stale_s; until then the answer is 200 with status "degraded", so
  that a load balancer does not turn a database's pause into an outage
* migrations: the tables are those of this version
* redis, worker: without either no request can be served
"""

from __future__ import annotations

import asyncio
import time
from typing import Final, Literal

import msgspec
from alembic.script import ScriptDirectory
from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from sqlalchemy import text

from billing.database import DatabaseUnavailable, transaction
from billing.schema import alembic_config
from service.front import Front

_FRESH_S: Final = 1.0
_WAIT_S: Final = 3.0


class Part(msgspec.Struct, frozen=True, kw_only=True):
    ready: bool
    detail: str = ""


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["ready", "degraded", "not ready"]
    parts: dict[str, Part]


class Liveness(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["live"] = "live"


class Health:
    """The last look at each part."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._head = ScriptDirectory.from_config(alembic_config("")).get_current_head()
        self._looked = 0.0  # monotonic
        self._seen = Readiness(status="not ready", parts={})
        self._database_seen = 0.0  # monotonic; 0: never
        self._looking = asyncio.Lock()

    async def look(self) -> Readiness:
        async with self._looking:
            if time.monotonic() - self._looked > _FRESH_S:
                self._seen = await self._look()
                self._looked = time.monotonic()
            return self._seen

    async def _look(self) -> Readiness:
        (database, migrations), redis = await asyncio.gather(self._database(), self._redis())
        parts = {"database": database, "migrations": migrations, "redis": redis, "worker": self._worker()}
        if all(part.ready for part in parts.values()):
            return Readiness(status="ready", parts=parts)
        away_s = time.monotonic() - self._database_seen
        serving = redis.ready and parts["worker"].ready and self._database_seen > 0
        if serving and not database.ready and away_s < self._front.settings.key_stale_s:
            return Readiness(status="degraded", parts=parts)
        return Readiness(status="not ready", parts=parts)

    async def _database(self) -> tuple[Part, Part]:
        """The database and its migrations."""
        try:
            version = await asyncio.wait_for(asyncio.to_thread(self._version), _WAIT_S)
        except (DatabaseUnavailable, TimeoutError):
            known = "; known keys are still served" if self._database_seen else ""
            unknown = Part(ready=bool(self._database_seen), detail="" if self._database_seen else "not known")
            return Part(ready=False, detail=f"does not answer{known}"), unknown
        if version != self._head:
            return Part(ready=True), Part(ready=False, detail="run `pennyweight migrate` (or alembic upgrade head)")
        self._database_seen = time.monotonic()
        return Part(ready=True), Part(ready=True)

    def _version(self) -> str | None:
        with transaction(self._front.database) as connection:
            if connection.scalar(text("SELECT to_regclass('alembic_version')")) is None:
                return None
            version: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
            return version

    async def _redis(self) -> Part:
        if await self._front.dispatch.ping():
            return Part(ready=True)
        return Part(ready=False, detail="does not answer")

    def _worker(self) -> Part:
        if any(model.cards for model in self._front.dispatch.workers.models()):
            return Part(ready=True)
        return Part(ready=False, detail="no living worker serves a model")


def routes(front: Front) -> list[HTTPRouteHandler]:
    health = Health(front)

    @get("/health/live", tags=["Health"], summary="Whether this process answers")
    async def live() -> Liveness:
        return Liveness()

    @get("/health/ready", tags=["Health"], summary="Whether a request would be served, and which part is missing")
    async def ready() -> Response[Readiness]:
        seen = await health.look()
        return Response(seen, status_code=503 if seen.status == "not ready" else 200)

    return [live, ready]
