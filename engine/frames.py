"""The file of a spool: frames that are whole or not there at all, in a file that only a living process can hold.

Format: little-endian frames ``type u8 | seq u64 | key 16 bytes | length u32 | crc32 u32 | payload``. A torn last frame
is dropped; a write that the disk refuses is taken back, because what follows a torn frame could not be read.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

RECORD: Final = 1
HELD: Final = 2
NO_KEY: Final = bytes(16)

_HEADER: Final = struct.Struct("<BQ16sII")


def frame(kind: int, seq: int, key: bytes, payload: bytes) -> bytes:
    return _HEADER.pack(kind, seq, key, len(payload), zlib.crc32(payload)) + payload


def frames(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """(kind, key, payload) of each whole frame, up to the first torn one."""
    at = 0
    while at + _HEADER.size <= len(data):
        kind, _, key, length, checksum = _HEADER.unpack_from(data, at)
        payload = data[at + _HEADER.size : at + _HEADER.size + length]
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return
        yield kind, key, payload
        at += _HEADER.size + length


def write_whole(file: IO[bytes], data: bytes, *, size: int) -> None:
    """Append ``data`` to an unbuffered file of ``size`` bytes. Raises OSError, and then the file is as it was."""
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        file.truncate(size)
        raise


def open_locked(path: Path, flags: int = os.O_RDWR | os.O_APPEND | os.O_CREAT) -> IO[bytes]:
    """Unbuffered and owner-only. Raises BlockingIOError when another process holds it."""
    file = os.fdopen(os.open(path, flags, 0o600), "ab+" if flags & os.O_CREAT else "rb+", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    return file
