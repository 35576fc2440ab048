"""The recorder: records stream in, one transaction out, acknowledged after the commit.

Any number of recorders share the stream as one consumer group. Each reads what has gathered, books it in one
transaction, and only then removes the entries and tells their producers the numbers, in one MULTI. What a recorder was
given and did not acknowledge is taken over by the others after a while; booking it again is harmless.

Postgres away: the batch waits and nothing is acknowledged. Redis away: wait. A batch that the books refuse is halved
until the poison stands alone; it goes to the dead letters, with an alarm, and the others go on.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import redis
import structlog
from sqlalchemy import Engine

from billing.database import DatabaseUnavailable, open_database, transaction
from billing.recording import Recorded, record
from engine.protocol import unpack_record
from service import logs, recorder_metrics
from service.records import Booked, convert, sort_out
from service.records_stream import Dead, Entry, RecordsStream
from service.settings import Settings

log = structlog.get_logger()

BATCH: Final = 500
_WAIT_MS: Final = 500  # for the first record of a batch
_GATHER_S: Final = 0.05  # for more of them
_TAKE_OVER_S: Final = 2.0  # how often to look for what another recorder left
_BACKOFF_S: Final = (0.1, 0.3, 1.0, 3.0)
_ALARM_S: Final = 60.0  # one line per cause and minute


@dataclass(frozen=True, slots=True)
class _Readable:
    entry: Entry
    record: Booked


class Recorder:
    """One consumer. ``stop`` ends ``run`` after the batch in hand."""

    def __init__(self, connection: redis.Redis, database: Engine, *, name: str) -> None:
        self._stream = RecordsStream(connection, name)
        self._database = database
        self._stopping = threading.Event()
        self._postgres = _Neighbour("postgres")
        self._redis = _Neighbour("redis")
        self._took_over = 0.0
        self._alarmed: dict[str, float] = {}

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                self.turn()
            except redis.RedisError as error:
                self._redis.away(error)
                self._stopping.wait(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1
            else:
                self._redis.back()
                failures = 0

    def turn(self) -> int:
        """Read, book and acknowledge one batch. Returns how many entries it had; raises RedisError."""
        entries = self._gather()
        if not entries:
            return 0
        started = time.monotonic()
        dead = self._book(entries)
        if dead is None:
            return 0  # stopped while Postgres was away: the entries stay with the group
        self._stream.acknowledge(entries, dead)
        recorder_metrics.BATCHES.observe(time.monotonic() - started)
        recorder_metrics.LAG.observe(max(0.0, time.time() - min(entry.sent_at for entry in entries)))
        recorder_metrics.BACKLOG.set(self._stream.length())
        return len(entries)

    def _gather(self) -> list[Entry]:
        """Up to BATCH entries: what others left behind, else what is new within a moment of the first."""
        if time.monotonic() - self._took_over > _TAKE_OVER_S:
            self._took_over = time.monotonic()
            if left := self._stream.take_over(BATCH):
                log.info("took over records of another recorder", records=len(left))
                return left
        entries = self._stream.read(BATCH, wait_ms=_WAIT_MS)
        deadline = time.monotonic() + _GATHER_S
        while entries and len(entries) < BATCH and (left_s := deadline - time.monotonic()) > 0:
            entries += self._stream.read(BATCH - len(entries), wait_ms=max(1, int(left_s * 1000)))
        return entries

    def _book(self, entries: Iterable[Entry]) -> list[Dead] | None:
        """The entries that the books will not take, once the others are in; None when stopped before they were."""
        readable, dead = _read(entries)
        failures = 0
        while True:
            try:
                dead += self._book_or_halve(readable)
            except DatabaseUnavailable as error:
                self._postgres.away(error)
                if self._stopping.wait(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]):
                    return None
                failures += 1
            else:
                self._postgres.back()
                for letter in dead:
                    self._alarm_dead(letter)
                return dead

    def _book_or_halve(self, batch: list[_Readable]) -> list[Dead]:
        """Each half is a transaction of its own, so what was booked before Postgres went away is booked again."""
        if not batch:
            return []
        try:
            self._count(batch, self._record(batch))
        except DatabaseUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one record must not hold up the others
            if len(batch) == 1:
                return [Dead(batch[0].entry, _name(error))]
            middle = len(batch) // 2
            return self._book_or_halve(batch[:middle]) + self._book_or_halve(batch[middle:])
        return []

    def _record(self, batch: list[_Readable]) -> Recorded:
        found = sort_out(readable.record for readable in batch)
        with transaction(self._database) as connection:
            return record(connection, settlements=found.settlements, attempts=found.attempts, intervals=found.intervals)

    def _count(self, batch: list[_Readable], new: Recorded) -> None:
        kinds = {"settlement": new.requests, "attempt": new.attempts, "interval": new.intervals}
        for kind, count in kinds.items():
            recorder_metrics.RECORDS.labels(kind).inc(count)
        recorder_metrics.REPEATED.inc(len(batch) - sum(kinds.values()))
        for model, count in new.unpriced.items():
            recorder_metrics.UNPRICED.labels(model).inc(count)
            self._alarm("no price is in force: pennyweight price set", model=model)
        for kind, count in new.uncosted.items():
            recorder_metrics.UNCOSTED.labels(kind).inc(count)
            self._alarm("no rate is in force: pennyweight device-rate set", device_kind=kind)

    def _alarm_dead(self, letter: Dead) -> None:
        recorder_metrics.DEAD_LETTERS.labels(letter.error).inc()
        log.error("dead letter", error=letter.error, producer=letter.entry.producer, number=letter.entry.number)

    def _alarm(self, event: str, **about: str) -> None:
        cause, now = f"{event} {about}", time.monotonic()
        if now - self._alarmed.get(cause, -_ALARM_S) >= _ALARM_S:
            self._alarmed[cause] = now
            log.error(event, **about)


class _Neighbour:
    """A server that may be away: one line when it goes and one when it is back."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._away = False

    def away(self, error: Exception) -> None:
        if not self._away:
            reason = str(error) if isinstance(error, DatabaseUnavailable) else type(error).__name__
            log.warning("records wait", until_back=self._name, error=reason)
        self._away = True

    def back(self) -> None:
        if self._away:
            log.info("records go on", back=self._name)
        self._away = False


def _read(entries: Iterable[Entry]) -> tuple[list[_Readable], list[Dead]]:
    readable, dead = [], []
    for entry in entries:
        try:
            readable.append(_Readable(entry, convert(unpack_record(entry.data))))
        except Exception as error:  # noqa: BLE001 - as above: nothing that a producer sends may hold up the others
            dead.append(Dead(entry, _name(error)))
    return readable, dead


def _name(error: Exception) -> str:
    """A class name, and for Postgres' own refusals which: never a text that may quote values."""
    cause = error.__cause__ if type(error).__module__.startswith("billing") else None
    origin = getattr(cause, "orig", cause)
    return type(origin or error).__name__


def run(settings: Settings) -> None:
    """The process: until SIGTERM or Ctrl-C, and then to the end of the batch in hand."""
    logs.configure()
    database = open_database(settings.database_url, pool_size=1)
    with redis.Redis.from_url(settings.redis_url, socket_timeout=10, socket_connect_timeout=5) as connection:
        recorder = Recorder(connection, database, name=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: recorder.stop())
        log.info("recorder started")
        recorder.run()
    database.dispose()
    log.info("recorder stopped")
