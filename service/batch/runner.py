"""The owner of deferred requests in one process: claims lines of batches and runs them, in an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, Final, TypeVar
from uuid import UUID

from sqlalchemy import Connection, Engine

from billing.batches import Batch, ClaimedLine, claim_lines, find_batch, give_back, renew_claims
from billing.contents import Seal
from billing.database import DatabaseUnavailable, transaction
from engine.protocol import Settlement
from service import logs, metrics
from service.batch.line import Desk, LaterError, LineRun
from service.dispatch import Dispatch
from service.generation import Generation
from service.settings import Settings
from service.telemetry import Tracing

CHUNK_S: Final = 60.0  # a task claims lines for so long, then makes room for another batch
LINES_AT_ONCE: Final = 8  # of one batch, in one process
LEASE: Final = timedelta(seconds=30)
_RENEW_S: Final = 10.0
_PAUSE_S: Final = 1.0  # when a line could not be run now
_T = TypeVar("_T")


class BatchRunner:
    """``run`` may be called by several threads at once, for as many batches."""

    def __init__(self, settings: Settings, database: Engine, seal: Seal) -> None:
        self._drain_s = settings.drain_s
        self._dispatch = Dispatch(settings, observe=self._observe)
        self._tracing = Tracing(self._dispatch.boot)
        self._desk = Desk(
            dispatch=self._dispatch,
            tracing=self._tracing,
            database=database,
            seal=seal,
            timeout_s=settings.request_timeout_s,
            cache_salt=settings.cache_salt,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="batches", daemon=True)
        self._renewing: asyncio.Task[None] | None = None
        self._draining = False
        self._running: set[UUID] = set()

    def start(self) -> None:
        self._thread.start()
        self._call(self._open())

    def run(self, batch_id: UUID) -> bool:
        """Run lines of the batch for a while. True when there may be more; False also while it runs here already."""
        return self._call(self._run(batch_id))

    def drain(self) -> None:
        """Claim nothing more; what runs may finish until drain_s and is given back then. Returns at once."""
        self._draining = True
        asyncio.run_coroutine_threadsafe(self._dispatch.drain(self._drain_s), self._loop)

    def close(self) -> None:
        """After the last ``run`` has returned."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        await self._dispatch.__aenter__()
        self._renewing = asyncio.create_task(self._renew())

    async def _close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        await self._dispatch.__aexit__(None, None, None)
        await asyncio.to_thread(self._tracing.close)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            if self._running:
                with contextlib.suppress(DatabaseUnavailable):  # then claims may lapse, and a late finish is refused
                    await self._books(lambda books: renew_claims(books, by=self._dispatch.boot, lease=LEASE))

    async def _run(self, batch_id: UUID) -> bool:
        batch = await self._books(lambda books: find_batch(books, batch_id))
        if batch is None or batch_id in self._running or self._draining:
            return False
        self._running.add(batch_id)
        tasks: set[asyncio.Task[bool]] = set()
        try:
            return await self._chunk(batch, tasks)
        finally:
            await asyncio.gather(*tasks)
            self._running.discard(batch_id)

    async def _chunk(self, batch: Batch, tasks: set[asyncio.Task[bool]]) -> bool:
        until = time.monotonic() + CHUNK_S
        while not self._draining and time.monotonic() < until:
            if room := LINES_AT_ONCE - len(tasks):
                lines = await self._claim(batch, room)
                tasks |= {asyncio.create_task(self._line(batch, line)) for line in lines}
            if not tasks:
                return False
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            tasks -= done
            if not all(task.result() for task in done):
                await asyncio.sleep(_PAUSE_S)
        return True

    async def _claim(self, batch: Batch, limit: int) -> list[ClaimedLine]:
        return await self._books(
            lambda books: claim_lines(
                books, self._desk.seal, batch.id, by=self._dispatch.boot, lease=LEASE, limit=limit
            )
        )

    async def _line(self, batch: Batch, line: ClaimedLine) -> bool:
        """Whether it has ended; otherwise it is given back."""
        try:
            await LineRun(self._desk, batch, line).run()
        except LaterError:
            with contextlib.suppress(DatabaseUnavailable):  # then its claim lapses
                await self._books(lambda books: give_back(books, batch.id, line.line, by=self._dispatch.boot))
            return False
        return True

    async def _books(self, work: Callable[[Connection], _T]) -> _T:
        def in_transaction() -> _T:
            with transaction(self._desk.database) as connection:
                return work(connection)

        return await asyncio.to_thread(in_transaction)

    def _observe(self, generation: Generation, record: Settlement) -> None:
        metrics.observe(record)
        self._tracing.settle(generation, record)
        logs.request_end(record, len(generation.facts.attempts))
