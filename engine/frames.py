"""The file of a spool: frames that are whole or not there at all, in a file that only a living process can hold.

Format: little-endian frames ``kind u8 | seq u64 | key 16 bytes | length u32 | crc32 u32 | payload``, then zeros: room
that was taken from the disk before it was needed. The checksum is over all of a frame but itself.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

RECORD: Final = 1
HELD: Final = 2
NO_KEY: Final = bytes(16)
UNFINISHED: Final = ".new"  # a file that is being written in place of another

_HEAD: Final = struct.Struct("<BQ16sI")
_CHECKSUM: Final = struct.Struct("<I")
HEADER_BYTES: Final = _HEAD.size + _CHECKSUM.size
_KIND: Final = re.compile(b"[%c%c]" % (RECORD, HELD))
_CHUNK: Final = 1 << 16  # room is taken from the disk in such pieces

Frame = tuple[int, bytes, bytes]  # kind, key, payload


def frame(kind: int, seq: int, key: bytes, payload: bytes) -> bytes:
    head = _HEAD.pack(kind, seq, key, len(payload))
    return head + _CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(head))) + payload


def frames(data: bytes) -> Iterator[Frame | int]:
    """Each whole frame and, where there is none, the number of bytes up to the next one or the end.

    Zeros at the end are no gap. A frame that is cut off is one: room is taken before a frame is written, so a producer
    that is killed leaves zeros, and a file that ends within a frame has lost something.
    """
    at, end = 0, len(data.rstrip(b"\0"))
    while at < end:
        found = _frame_at(data, at)
        if found is None:
            following = _next_whole(data, at + 1)
            yield (end if following is None else following) - at
            if following is None:
                return
            at = following
        else:
            yield found
            at += HEADER_BYTES + len(found[2])


def _frame_at(data: bytes, at: int) -> Frame | None:
    body = at + HEADER_BYTES
    if body > len(data):
        return None
    kind, _, key, length = _HEAD.unpack_from(data, at)
    (checksum,) = _CHECKSUM.unpack_from(data, at + _HEAD.size)
    if body + length > len(data) or kind not in {RECORD, HELD}:
        return None
    payload = data[body : body + length]
    whole = zlib.crc32(payload, zlib.crc32(data[at : at + _HEAD.size])) == checksum
    return (kind, key, payload) if whole else None


def _next_whole(data: bytes, at: int) -> int | None:
    """Searched for byte by byte, because the length of a damaged frame may be what is damaged."""
    places = (found.start() for found in _KIND.finditer(data, at))
    return next((place for place in places if _frame_at(data, place) is not None), None)


class FrameFile:
    """An append-only file, locked, and with room for more taken from the disk."""

    def __init__(self, path: Path) -> None:
        """Create and lock; it appears under its name only when it is locked. Raises OSError, also when it is there."""
        if path.exists():
            raise FileExistsError(errno.EEXIST, "is the spool of another producer", path)
        self.size = 0  # of the frames
        self._path = path
        self._file, self._room = _fresh(path, b"", room=0)  # room: bytes taken from the disk

    def append(self, data: bytes, *, spare: int) -> None:
        """Append, and have room for ``spare`` bytes behind. Raises OSError, and then the file is as it was."""
        self._room = _take_room(self._file, self._room, self.size + len(data) + spare)
        try:
            _write(self._file, data, self.size)
        except OSError:
            self._file.truncate(self.size)
            self._room = self.size
            raise
        self.size += len(data)

    def rewrite(self, data: bytes, *, spare: int) -> None:
        """Have ``data`` in place of all that is in it. Raises OSError, and then the file is as it was."""
        fresh, room = _fresh(self._path, data, room=len(data) + spare)
        self._file.close()
        self._file, self._room, self.size = fresh, room, len(data)

    def empty(self) -> None:
        if self.size:
            self._file.truncate(0)
            self.size = self._room = 0

    def close(self) -> None:
        """Give back the room and release the lock. An empty file goes."""
        with self._file:
            if self.size:
                self._file.truncate(self.size)
            else:
                self._path.unlink(missing_ok=True)


def open_locked(path: Path, flags: int = os.O_RDWR) -> IO[bytes]:
    """Unbuffered and owner-only. Raises BlockingIOError when another process holds it."""
    file = os.fdopen(os.open(path, flags, 0o600), "rb+", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    return file


def _fresh(path: Path, data: bytes, *, room: int) -> tuple[IO[bytes], int]:
    """A file of its own, locked, that has taken the name when it was whole, and its room."""
    unfinished = path.with_suffix(UNFINISHED)
    unfinished.unlink(missing_ok=True)
    file = open_locked(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        taken = _take_room(file, 0, room)
        _write(file, data, 0)
        unfinished.rename(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        file.close()
        raise
    return file, taken


def _take_room(file: IO[bytes], have: int, wanted: int) -> int:
    """Returns what the file has now."""
    if wanted <= have:
        return have
    room = -(-wanted // _CHUNK) * _CHUNK
    try:
        os.posix_fallocate(file.fileno(), have, room - have)
    except OSError:
        file.truncate(have)
        raise
    return room


def _write(file: IO[bytes], data: bytes, at: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(file.fileno(), left, at)
        left, at = left[written:], at + written
