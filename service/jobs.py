"""What `pennyweight tasks` does: chores that are due by the clock, and batches when somebody nudges.

rollup      dirty sums, so that every sum is right within 15 seconds
sweep       requests and attempts that nobody will close any more
partitions  of the months to come; at the start, then hourly
purge       texts, logins and sessions that have expired; at the start, then hourly
batches     nudge batches that have lines which nobody runs, also those that a dead process left

While Postgres is away each run ends after a short wait and the next one tries again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final
from uuid import UUID

import structlog
from celery import Celery
from sqlalchemy import Connection, Engine

from billing import contents, sessions
from billing.batches import waiting_batches
from billing.contents import Seal, SealError
from billing.database import open_database, transaction
from billing.partitions import make_ahead
from billing.rollup import roll_up
from billing.sweeping import sweep
from service import logs
from service.batch.runner import BatchRunner
from service.celery_app import THREADS, Chore, connect, guarded, schedule, work
from service.settings import Settings

log = structlog.get_logger()

BATCH: Final = "batch"  # the task; its one argument is the id of a batch
BATCHES_AT_ONCE: Final = THREADS // 2  # the other threads are for the chores
_HOUR_S: Final = 3600.0
_NUDGE_S: Final = 5.0
_NUDGES: Final = 100


def run(settings: Settings) -> None:
    """Until SIGTERM or Ctrl-C. Ends the process with Celery's exit status if it is not 0."""
    logs.configure()
    database = open_database(settings.database_url, pool_size=THREADS)
    app = connect(settings.redis_url)
    schedule(app, chores(app, database, grace=timedelta(seconds=settings.settle_grace_s)))
    runner = _batch_runner(settings, database)
    if runner is not None:
        runner.start()
        app.task(_batch_task(app, runner), name=BATCH, shared=False)
    try:
        status = work(app, settings.redis_url, stopping=runner.drain if runner else lambda: None)
    finally:
        if runner is not None:
            runner.close()
        database.dispose()
    raise SystemExit(status)


def nudge(app: Celery, batch_id: UUID, *, expires_s: float | None = None) -> None:
    """Say that the batch has lines to run. Raises kombu.exceptions.OperationalError while Redis is away."""
    app.send_task(BATCH, [str(batch_id)], expires=expires_s, ignore_result=True)


def chores(app: Celery, database: Engine, *, grace: timedelta) -> list[Chore]:
    def on(work: Callable[[Connection], int]) -> Callable[[], int]:
        return partial(_in_transaction, database, work)

    return [
        Chore(name="rollup", every_s=3, work=partial(_until_done, on(roll_up))),
        Chore(name="sweep", every_s=10, work=partial(_until_done, on(partial(_sweep, grace=grace)))),
        Chore(name="partitions", every_s=_HOUR_S, work=on(_make_partitions)),
        Chore(name="purge", every_s=_HOUR_S, work=on(lambda books: contents.purge(books) + sessions.purge(books))),
        Chore(name="batches", every_s=_NUDGE_S, work=partial(_nudge_waiting, app, database)),
    ]


def _in_transaction(database: Engine, work: Callable[[Connection], int]) -> int:
    with transaction(database) as connection:
        return work(connection)


def _until_done(work: Callable[[], int]) -> int:
    """A turn has a bound, so that no transaction is long; go on until there is nothing left."""
    total = 0
    while count := work():
        total += count
    return total


def _sweep(books: Connection, *, grace: timedelta) -> int:
    swept = sweep(books, grace=grace)
    return swept.requests + swept.attempts


def _make_partitions(books: Connection) -> int:
    return len(make_ahead(books, datetime.now(UTC)))


def _nudge_waiting(app: Celery, database: Engine) -> int:
    with transaction(database) as books:
        waiting = waiting_batches(books, limit=_NUDGES)
    for batch_id in waiting:
        nudge(app, batch_id, expires_s=_NUDGE_S)
    return 0  # that a batch runs is no news


def _batch_runner(settings: Settings, database: Engine) -> BatchRunner | None:
    try:
        return BatchRunner(settings, database, Seal(settings.secret))
    except SealError as error:
        log.warning("no batches are run here", reason=str(error))
        return None


def _batch_task(app: Celery, runner: BatchRunner) -> Callable[[str], None]:
    slots = threading.BoundedSemaphore(BATCHES_AT_ONCE)

    def chunk(batch_id: str) -> int:
        if runner.run(UUID(batch_id)):
            nudge(app, UUID(batch_id))
        return 0

    def run_batch(batch_id: str) -> None:
        if not slots.acquire(blocking=False):
            return  # the next nudge comes in seconds
        try:
            guarded(BATCH, partial(chunk, batch_id))
        finally:
            slots.release()

    return run_batch
