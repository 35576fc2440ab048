"""What a producer of records has written and the recorder has not committed: a small append-only file, and its sender.

Part of the engine's torch-free face, because workers and owners both produce records.

A record is appended to the file before it is sent, and forgotten when its number comes back from the recorder. A record
whose stream entry is gone while its number has not come back was lost with Redis and is sent again; primary keys make a
repetition harmless. A *held* record is one that shall be sent only if its producer dies: an owner holds a failed
Settlement from the admission of a request until it appends the true one. Room for the true one is taken from the disk
together with the held one, so a full disk refuses admissions and never a settlement. What the disk refuses all the same
is kept in memory, sent like all others, and written once there is room.

The file survives kill -9 of its producer (it is not synced, so not a power cut). It is locked while its producer lives;
a free lock means a dead producer, whose file the next producer in the folder adopts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import redis
import structlog

from engine.adoption import SUFFIX, Adopted, adopt
from engine.frames import HEADER_BYTES, HELD, NO_KEY, RECORD, FrameFile, frame
from engine.keys import DATA, PRODUCER, RECORDS, SEQ, committed_key

log = structlog.get_logger()

_COMPACT_BYTES: Final = 1 << 20
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
    room: int = 0  # bytes of the file that are taken for it, or for what will replace it, and not written yet
    stream_id: bytes | None = None  # None: not sent yet
    sent_at: float = 0.0  # monotonic

    def frame(self) -> bytes:
        return frame(HELD if self.held else RECORD, self.seq, self.key, self.payload)


class Spool:
    """The file of one producer. Safe to use from several threads."""

    def __init__(self, folder: Path, producer: str) -> None:
        """Create and lock ``folder/producer.spool``. Raises OSError when the folder is not writable."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.producer = producer
        self._file = FrameFile(folder / f"{producer}{SUFFIX}")
        self._entries: dict[int, Entry] = {}
        self._held: dict[bytes, int] = {}
        self._unwritten: dict[int, Entry] = {}  # kept in memory: the disk has refused them
        self._room = 0  # of all entries
        self._next = 1
        self._grows = True  # whether the disk took what was written last
        self._lock = threading.Lock()

    def append(self, payload: bytes, *, replaces: bytes = NO_KEY) -> int:
        """Keep a record until it is committed; drops what was held under ``replaces``. Returns its number.

        When the disk refuses it, it is kept in memory until ``write`` succeeds.
        """
        with self._lock:
            held = self._entries.pop(self._held.pop(replaces, 0), None)
            entry = self._entry(payload, replaces, held=False, room=held.room if held else 0)
            self._entries[entry.seq] = self._unwritten[entry.seq] = entry
            self._write_all()
            return entry.seq

    def hold(self, key: bytes, payload: bytes, *, room: int) -> None:
        """Keep a record that is sent only by an adopter, unless ``append(…, replaces=key)`` comes first.

        ``room``: at most so many bytes the replacing record will have. Raises OSError when the disk has no room for
        both; then nothing is held.
        """
        with self._lock:
            entry = self._entry(payload, key, held=True, room=room + HEADER_BYTES)
            self._file.append(entry.frame(), spare=self._room + entry.room)
            self._room += entry.room
            self._entries[entry.seq] = entry
            self._held[key] = entry.seq

    def commit(self, numbers: Iterable[int]) -> None:
        """Forget records. Unknown numbers are ignored: a commit may be told twice."""
        with self._lock:
            for number in numbers:
                if entry := self._entries.pop(number, None):
                    self._room -= entry.room
                    self._unwritten.pop(number, None)
            self._compact()

    def write(self) -> None:
        """Try again what the disk has refused."""
        with self._lock:
            self._write_all()

    def unwritten(self) -> int:
        with self._lock:
            return len(self._unwritten)

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
            self._write_all()
            if self._unwritten:
                unsent = sum(entry.stream_id is None for entry in self._unwritten.values())
                log.error("records lost: the disk has no room", records=len(self._unwritten), never_sent=unsent)
            if not self._entries:
                self._file.empty()
            self._file.close()

    def _entry(self, payload: bytes, key: bytes, *, held: bool, room: int) -> Entry:
        self._next += 1
        return Entry(seq=self._next - 1, key=key, payload=payload, held=held, room=room)

    def _write_all(self) -> None:
        """Write what is in memory only, oldest first, as far as there is room."""
        try:
            for entry in list(self._unwritten.values()):
                self._file.append(entry.frame(), spare=self._room - entry.room)
                self._room -= entry.room
                entry.room = 0
                del self._unwritten[entry.seq]
        except OSError as error:
            self._refused("records wait for the disk", error)
        else:
            self._grows = True

    def _compact(self) -> None:
        """Make the file small again. When the disk refuses that, it stays as it was."""
        try:
            if not self._entries:
                self._file.empty()
            elif self._file.size >= _COMPACT_BYTES:
                self._rewrite()
        except OSError as error:
            self._refused("spool not compacted", error)

    def _rewrite(self) -> None:
        live = b"".join(entry.frame() for entry in self._entries.values())
        if len(live) * 2 > self._file.size:
            return
        spare = self._room - sum(entry.room for entry in self._unwritten.values())
        self._file.rewrite(live, spare=spare)
        self._room = spare
        for entry in self._unwritten.values():
            entry.room = 0
        self._unwritten.clear()

    def _refused(self, what: str, error: OSError) -> None:
        """Say it once, not with every record."""
        if self._grows:
            log.error(what, producer=self.producer, unwritten=len(self._unwritten), error=type(error).__name__)
        self._grows = False


class RecordProducer:
    """Sends the records of one producer to the records stream from a thread of its own.

    ``put`` and ``hold`` only append to the file, so they never wait for Redis. While Redis is away records gather in
    the spool and are sent when it is back. While the disk is full they are sent from memory.
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

        def take(record: Adopted) -> bool:
            self.put(revive(record.payload) if record.held else record.payload)
            return not self._spool.unwritten()

        adopted = adopt(self._folder, take)
        self._thread.start()
        return adopted

    def put(self, payload: bytes, *, replaces: bytes = NO_KEY) -> None:
        """Never raises: what the disk refuses is kept in memory, sent, and written as soon as there is room."""
        self._spool.append(payload, replaces=replaces)
        self._wake.set()

    def hold(self, key: bytes, payload: bytes, *, room: int) -> None:
        """See ``Spool.hold``. Raises OSError when there is no room."""
        self._spool.hold(key, payload, room=room)

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
                self._spool.write()
                while self._send_some():
                    pass
                self._learn_commits()
                if time.monotonic() - checked > _RESEND_AFTER_S:
                    checked = time.monotonic()
                    self._resend_lost()
            except redis.RedisError as error:
                log.warning("records wait for redis", producer=self.producer, error=type(error).__name__)
                time.sleep(_TICK_S)
            except Exception as error:  # whose thread ends here never sends again, and nobody would know
                log.exception("sending records failed", producer=self.producer, error=type(error).__name__)
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
