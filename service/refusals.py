"""Refusals, counted in memory by tenant, key, cause and quarter of an hour, and written down every few seconds.

While Postgres is away the counts wait here; they are few, because causes are few, and their number is bounded.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

import structlog
from sqlalchemy import Engine

from billing import refusals
from billing.database import DatabaseUnavailable, transaction
from billing.rollup import quarter_of

log = structlog.get_logger()

_EVERY_S: Final = 5.0
_CAPACITY: Final = 20_000


class Refusals:
    """The counts of one process."""

    def __init__(self, database: Engine) -> None:
        self._database = database
        self._counts: Counter[refusals.Refusal] = Counter()

    def add(self, cause: str, tenant_id: UUID | None = None, api_key_id: UUID | None = None) -> None:
        """Tenant and key are None for a caller who is not known."""
        refusal = refusals.Refusal(quarter_of(datetime.now(UTC)), tenant_id, api_key_id, cause)
        if refusal in self._counts or len(self._counts) < _CAPACITY:
            self._counts[refusal] += 1

    async def run(self) -> None:
        """Write what has gathered, for ever."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.flush()

    async def flush(self) -> None:
        """Write it now; what cannot be written is kept."""
        counts, self._counts = self._counts, Counter()
        if not counts:
            return
        try:
            await asyncio.shield(asyncio.to_thread(self._write, counts))
        except DatabaseUnavailable as error:
            self._counts.update(counts)
            log.warning("refusals wait for postgres", counts=len(self._counts), error=str(error))

    def _write(self, counts: Counter[refusals.Refusal]) -> None:
        with transaction(self._database) as connection:
            refusals.add(connection, counts)
