"""What a producer of records has written and the recorder has not committed: a small append-only file, and its sender.

Part of the engine's torch-free face, because workers and owners both produce records.

A record is appended to the file before it is sent, and forgotten when its number comes back from the recorder. A record
whose stream entry is gone while its number has not come back was lost with Redis and is sent again; primary keys make a
repetition harmless. A *held* record is one that shall be sent only if its producer dies: an owner holds a failed
Settlement from the admission of a request until it appends the true one.

The file survives kill -9 of its producer (it is not synced, so not a power cut). It is locked while its producer lives;
a free lock means a dead producer, whose file the next producer in the folder adopts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import redis
import structlog

from engine.frames import HELD, NO_KEY, RECORD, frame, frames, open_locked, write_whole
from engine.protocol import DATA, PRODUCER, RECORDS, SEQ, committed_key

log = structlog.get_logger()

_COMPACT_BYTES: Final = 1 << 20
_SUFFIX: Final = ".spool"
_BATCH: Final = 500
_TICK_S: Final = 0.5
_RESEND_AFTER_S: Final = 5.0


@dataclass(slots=True)
class Entry:
    """One live frame."""

    seq: int
    key: bytes
    payload: bytes
    held: bool
    stream_id: bytes | None = None  # None: not sent yet
    sent_at: float = 0.0  # monotonic


@dataclass(frozen=True, slots=True)
class Adopted:
    """A live record of a dead producer. ``held`` says that its producer never replaced it by the true one."""

    payload: bytes
    held: bool


class Spool:
    """The file of one producer. Safe to use from several threads."""

    def __init__(self, folder: Path, producer: str) -> None:
        """Create and lock ``folder/producer.spool``. Raises OSError when the folder is not writable."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.producer = producer
        self._path = folder / f"{producer}{_SUFFIX}"
        self._file = open_locked(self._path)
        self._entries: dict[int, Entry] = {}
        self._held: dict[bytes, int] = {}
        self._next = 1
        self._bytes = 0
        self._lock = threading.Lock()

    def append(self, payload: bytes, *, replaces: bytes = NO_KEY) -> int:
        """Keep a record until it is committed; drops what was held under ``replaces``. Returns its number."""
        with self._lock:
            seq = self._write(RECORD, replaces, payload)
            self._entries.pop(self._held.pop(replaces, 0), None)
            return seq

    def hold(self, key: bytes, payload: bytes) -> None:
        """Keep a record that is sent only by an adopter, unless ``append(…, replaces=key)`` comes first."""
        with self._lock:
            self._held[key] = self._write(HELD, key, payload)

    def commit(self, numbers: Iterable[int]) -> None:
        """Forget records. Unknown numbers are ignored: a commit may be told twice."""
        with self._lock:
            for number in numbers:
                self._entries.pop(number, None)
            self._compact()

    def unsent(self, limit: int) -> list[Entry]:
        with self._lock:
            chosen = (entry for entry in self._entries.values() if entry.stream_id is None and not entry.held)
            return [entry for entry, _ in zip(chosen, range(limit), strict=False)]

    def sent(self) -> list[Entry]:
        """Sent and not committed, oldest first."""
        with self._lock:
            return [entry for entry in self._entries.values() if entry.stream_id is not None]

    def uncommitted(self) -> int:
        with self._lock:
            return len(self._entries) - len(self._held)

    def close(self) -> None:
        """Release the lock; the file goes if nothing in it is alive, else the next producer adopts it."""
        with self._lock:
            if not self._entries:
                self._path.unlink(missing_ok=True)
            self._file.close()

    def _write(self, kind: int, key: bytes, payload: bytes) -> int:
        seq = self._next
        self._next += 1
        entry = Entry(seq=seq, key=key, payload=payload, held=kind == HELD)
        data = _frame(entry)
        write_whole(self._file, data, size=self._bytes)
        self._bytes += len(data)
        self._entries[seq] = entry
        return seq

    def _compact(self) -> None:
        if not self._entries:
            if self._bytes:
                self._file.truncate(0)
                self._bytes = 0
            return
        if self._bytes < _COMPACT_BYTES:
            return
        live = b"".join(_frame(entry) for entry in self._entries.values())
        if len(live) * 2 > self._bytes:
            return
        fresh_path = self._path.with_suffix(".new")
        fresh = open_locked(fresh_path)
        write_whole(fresh, live, size=0)
        fresh_path.rename(self._path)
        self._file.close()
        self._file = fresh
        self._bytes = len(live)


class RecordProducer:
    """Sends the records of one producer to the records stream from a thread of its own.

    ``put`` and ``hold`` only append to the file, so they never wait for Redis. While Redis is away records gather in
    the spool and are sent when it is back.
    """

    def __init__(self, connection: redis.Redis, folder: Path, producer: str) -> None:
        self._redis = connection
        self._spool = Spool(folder, producer)
        self._folder = folder
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"records-{producer}", daemon=True)

    @property
    def producer(self) -> str:
        return self._spool.producer

    def start(self, revive: Callable[[bytes], bytes]) -> int:
        """Adopt what dead producers left in the folder and start sending. Returns the number of adopted records.

        ``revive`` gets the payload of a record that a dead producer held and returns what shall be sent in its place.
        """
        adopted = adopt(self._folder, lambda r: self.put(revive(r.payload) if r.held else r.payload))
        self._thread.start()
        return adopted

    def put(self, payload: bytes, *, replaces: bytes = NO_KEY) -> None:
        self._spool.append(payload, replaces=replaces)
        self._wake.set()

    def hold(self, key: bytes, payload: bytes) -> None:
        self._spool.hold(key, payload)

    def uncommitted(self) -> int:
        return self._spool.uncommitted()

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is left, wait for the commits until the timeout, release the file."""
        deadline = time.monotonic() + timeout_s
        while self._spool.uncommitted() and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(0.05)
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=1 + timeout_s)
        self._spool.close()

    def _run(self) -> None:
        checked = 0.0
        while not self._stopping:
            self._wake.wait(timeout=_TICK_S)
            self._wake.clear()
            try:
                while self._send_some():
                    pass
                self._learn_commits()
                if time.monotonic() - checked > _RESEND_AFTER_S:
                    checked = time.monotonic()
                    self._resend_lost()
            except redis.RedisError as error:
                log.warning("records wait for redis", producer=self.producer, error=type(error).__name__)
                time.sleep(_TICK_S)

    def _send_some(self) -> bool:
        entries = self._spool.unsent(_BATCH)
        if not entries:
            return False
        pipe = self._redis.pipeline(transaction=False)
        for entry in entries:
            pipe.xadd(RECORDS, {PRODUCER: self.producer.encode(), SEQ: b"%d" % entry.seq, DATA: entry.payload})
        now = time.monotonic()
        for entry, stream_id in zip(entries, pipe.execute(), strict=True):
            entry.stream_id, entry.sent_at = stream_id, now
        return True

    def _learn_commits(self) -> None:
        while self._spool.uncommitted():
            numbers = self._redis.lpop(committed_key(self.producer), _BATCH)
            if not numbers:
                return
            self._spool.commit(int(number) for number in numbers)

    def _resend_lost(self) -> None:
        """Mark as unsent what is neither in the stream nor committed: Redis lost it."""
        before = time.monotonic() - _RESEND_AFTER_S
        old = [entry for entry in self._spool.sent() if entry.sent_at < before][:_BATCH]
        if not old:
            return
        pipe = self._redis.pipeline(transaction=False)
        for entry in old:
            pipe.xrange(RECORDS, entry.stream_id or "-", entry.stream_id or "+")
        lost = [entry for entry, found in zip(old, pipe.execute(), strict=True) if not found]
        self._learn_commits()  # a commit between the two looks deletes the entry and tells the number in one step
        alive = {entry.seq for entry in self._spool.sent()}
        for entry in lost:
            if entry.seq in alive:
                entry.stream_id = None


def _frame(entry: Entry) -> bytes:
    return frame(HELD if entry.held else RECORD, entry.seq, entry.key, entry.payload)


def _adopt_files(folder: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            file = open_locked(path, os.O_RDWR | os.O_APPEND)
        except (BlockingIOError, FileNotFoundError):
            continue  # its producer lives, or another adopter was faster
        with file:
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:  # else compaction has just replaced it
                yield path, file


def adopt(folder: Path, take: Callable[[Adopted], None]) -> int:
    """Give every live record of dead producers in ``folder`` to ``take``, oldest first, and remove their files.

    A file goes only after all of it was taken, so a crash in between repeats records and loses none. Records that were
    already committed may be among them. Returns how many were taken.
    """
    count = 0
    for path, file in _adopt_files(folder):
        for record in _live_records(file.read()):
            take(record)
            count += 1
        path.unlink()
    return count


def _live_records(data: bytes) -> list[Adopted]:
    held: dict[bytes, bytes] = {}
    records: list[Adopted] = []
    for kind, key, payload in frames(data):
        if kind == HELD:
            held[key] = payload
        else:
            held.pop(key, None)
            records.append(Adopted(payload=payload, held=False))
    return records + [Adopted(payload=payload, held=True) for payload in held.values()]
