"""The recorder's end of the records stream: a consumer of its group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis
import structlog

from engine.keys import DATA, DEAD_LETTERS, PRODUCER, RECORDER_GROUP, RECORDS, SEQ, committed_key

log = structlog.get_logger()

_TAKE_OVER_AFTER_MS: Final = 10_000  # longer than a living recorder holds a batch while Postgres is there
_FORGET_AFTER_MS: Final = 3_600_000  # a consumer that is dead for so long
_COMMITTED_TTL_S: Final = 86_400  # a producer that is away for longer sends its records again, which is harmless


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the stream. An entry without our fields is an empty record of nobody: a dead letter."""

    stream_id: bytes
    fields: dict[bytes, bytes]

    @property
    def data(self) -> bytes:
        return self.fields.get(DATA, b"")

    @property
    def producer(self) -> str:
        return self.fields.get(PRODUCER, b"").decode(errors="replace")

    @property
    def number(self) -> int | None:
        number = self.fields.get(SEQ, b"")
        return int(number) if number.isdigit() else None

    @property
    def sent_at(self) -> float:
        """Redis' own time of the XADD, seconds since the epoch."""
        return int(self.stream_id.split(b"-")[0]) / 1000


@dataclass(frozen=True, slots=True)
class Dead:
    """An entry that the books will not take, and why: a class name, never a text."""

    entry: Entry
    error: str

    @property
    def fields(self) -> dict[Any, Any]:
        return {**self.entry.fields, b"error": self.error}


class RecordsStream:
    """Every method raises RedisError when Redis is away, and makes the group again when Redis was emptied."""

    def __init__(self, connection: redis.Redis, consumer: str) -> None:
        self._redis = connection
        self._consumer = consumer

    def read(self, count: int, *, wait_ms: int) -> list[Entry]:
        """Entries that no consumer was given yet; waits for the first."""
        try:
            answer: Any = self._redis.xreadgroup(
                RECORDER_GROUP, self._consumer, {RECORDS: ">"}, count=count, block=wait_ms
            )
        except redis.ResponseError as error:
            self._make_group(error)
            return []
        return _entries(answer[0][1]) if answer else []

    def take_over(self, count: int) -> list[Entry]:
        """Entries that a consumer was given and has neither acknowledged nor touched for long."""
        try:
            answer: Any = self._redis.xautoclaim(
                RECORDS, RECORDER_GROUP, self._consumer, min_idle_time=_TAKE_OVER_AFTER_MS, count=count
            )
            self._forget_the_dead()
        except redis.ResponseError as error:
            self._make_group(error)
            return []
        return _entries(answer[1])

    def acknowledge(self, entries: Sequence[Entry], dead: Iterable[Dead]) -> None:
        """Remove the entries and tell their producers, who then forget them; all or nothing."""
        numbers: dict[str, list[int]] = defaultdict(list)
        for entry in entries:
            if entry.number is not None and entry.producer:
                numbers[entry.producer].append(entry.number)
        ids = [entry.stream_id for entry in entries]
        pipe = self._redis.pipeline(transaction=True)
        for letter in dead:
            pipe.xadd(DEAD_LETTERS, letter.fields)
        pipe.xack(RECORDS, RECORDER_GROUP, *ids)
        pipe.xdel(RECORDS, *ids)
        for producer, committed in numbers.items():
            pipe.rpush(committed_key(producer), *committed)
            pipe.expire(committed_key(producer), _COMMITTED_TTL_S)
        pipe.execute()

    def length(self) -> int:
        return int(self._redis.xlen(RECORDS))

    def _make_group(self, error: redis.ResponseError) -> None:
        """The stream is new, or Redis was emptied: from its first entry, not from now on."""
        if not str(error).startswith("NOGROUP"):
            raise error
        try:
            self._redis.xgroup_create(RECORDS, RECORDER_GROUP, id="0", mkstream=True)
            log.info("made the consumer group", stream=RECORDS)
        except redis.ResponseError as busy:
            if not str(busy).startswith("BUSYGROUP"):
                raise

    def _forget_the_dead(self) -> None:
        consumers: Any = self._redis.xinfo_consumers(RECORDS, RECORDER_GROUP)
        for consumer in consumers:
            if consumer["pending"] == 0 and consumer["idle"] > _FORGET_AFTER_MS:
                self._redis.xgroup_delconsumer(RECORDS, RECORDER_GROUP, consumer["name"])


def _entries(found: Iterable[tuple[bytes, dict[bytes, bytes] | None]]) -> list[Entry]:
    """An entry deleted while it was pending comes without fields, and is nothing to record."""
    return [Entry(stream_id, fields) for stream_id, fields in found if fields]
