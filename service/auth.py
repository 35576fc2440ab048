"""Who is asking: keys, believed for some seconds and longer while Postgres is away.

The secret itself is never kept: the cache is keyed by its SHA-256. A key in use is asked about again in the background
before its time is up, so that no request waits for Postgres once a key is known.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import structlog
from sqlalchemy import Engine

from billing.database import DatabaseUnavailable, transaction
from billing.keys import Principal, authenticate, digest
from service.admission import Scope
from service.settings import Settings

log = structlog.get_logger()

_CAPACITY: Final = 10_000  # keys, wrong ones included
_WAIT_S: Final = 2.0  # for Postgres, before a known key is believed without it
_AWAY_S: Final = 1.0  # after a failure: known keys are not asked about for so long


class KeysUnavailableError(Exception):
    """Postgres is away and this key is not known."""


@dataclass(slots=True)
class _Known:
    principal: Principal | None  # None: no such key
    at: float  # monotonic


class Keys:
    """The cache of one process."""

    def __init__(self, database: Engine, settings: Settings) -> None:
        self._database = database
        self._believe_s, self._stale_s = settings.key_cache_s, settings.key_stale_s
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[Principal | None]] = {}
        self._away_until = 0.0

    async def principal(self, secret: str) -> Principal | None:
        """Whose key this is; None for one that was never made. Look at ``refused`` before serving it.

        Raises KeysUnavailableError.
        """
        hashed = digest(secret)
        known = self._known.get(hashed)
        age = time.monotonic() - known.at if known else 0.0
        if known and age < self._believe_s:
            if age > self._believe_s / 2:
                self._ask(hashed, secret)
            return known.principal
        try:
            return await self._answer(hashed, secret)
        except (DatabaseUnavailable, TimeoutError) as error:
            self._away_until = time.monotonic() + _AWAY_S
            if known and known.principal and age < self._stale_s:
                return known.principal
            raise KeysUnavailableError from error

    async def _answer(self, hashed: bytes, secret: str) -> Principal | None:
        if time.monotonic() < self._away_until:
            raise TimeoutError
        return await asyncio.wait_for(asyncio.shield(self._ask(hashed, secret)), _WAIT_S)

    def _ask(self, hashed: bytes, secret: str) -> asyncio.Task[Principal | None]:
        """One question at a time for each key, however many requests wait for it."""
        task = self._asking.get(hashed)
        if task is None:
            task = self._asking[hashed] = asyncio.create_task(self._look_up(hashed, secret))
            task.add_done_callback(lambda done: self._asked(hashed, done))
        return task

    def _asked(self, hashed: bytes, done: asyncio.Task[Principal | None]) -> None:
        del self._asking[hashed]
        if not done.cancelled():
            done.exception()  # whoever waits has it; a question in the background may fail

    async def _look_up(self, hashed: bytes, secret: str) -> Principal | None:
        principal = await asyncio.to_thread(_query, self._database, lambda: secret)
        self._known[hashed] = _Known(principal, time.monotonic())
        self._known.move_to_end(hashed)
        while len(self._known) > _CAPACITY:
            self._known.popitem(last=False)
        return principal


def refused(principal: Principal) -> bool:
    """Whether the key is revoked or has expired, if only since it was looked up."""
    return principal.refusal is not None or (
        principal.expires_at is not None and principal.expires_at <= datetime.now(UTC)
    )


def scopes_of(principal: Principal) -> tuple[Scope, ...]:
    """The limits that hold for a request of this key: the tenant's and its own."""
    tenant, key = principal.tenant_limits, principal.key_limits
    return (
        Scope(name=f"tenant:{principal.tenant_id}", rpm=tenant.rpm, tpm=tenant.tpm, concurrency=tenant.concurrency),
        Scope(name=f"key:{principal.key_id}", rpm=key.rpm, tpm=key.tpm, concurrency=key.concurrency),
    )


def _query(database: Engine, secret: Callable[[], str]) -> Principal | None:
    """The secret comes in a closure, so that no log of a failed call can show it as an argument."""
    with transaction(database) as connection:
        return authenticate(connection, secret())
