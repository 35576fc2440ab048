"""What dead producers left in a folder of spools, for one that lives.

Whatever is wrong with one record or one file costs that record or file alone: it is set aside as ``*.damaged``, with an
error in the log, and never keeps a process from starting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import structlog

from engine.frames import HELD, UNFINISHED, frames, open_locked

log = structlog.get_logger()

SUFFIX: Final = ".spool"
DAMAGED: Final = ".damaged"


@dataclass(frozen=True, slots=True)
class Adopted:
    """A live record of a dead producer. ``held`` says that its producer never replaced it by the true one."""

    payload: bytes
    held: bool


@dataclass(slots=True)
class _Outcome:
    """What became of one file."""

    taken: int = 0
    unsafe: int = 0  # taken, but only into memory
    refused: int = 0  # whole, but nothing that ``take`` could read
    gaps: int = 0
    lost_bytes: int = 0


def adopt(folder: Path, take: Callable[[Adopted], bool]) -> int:
    """Give every live record of dead producers in ``folder`` to ``take``, oldest first, and remove their files.

    ``take`` says whether the record is safe on the disk. A file goes only after all of it is, so a crash or a full disk
    repeats records and loses none. Records that were already committed may be among them. Returns how many were taken.
    """
    count = 0
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            with _orphan(path) as file:
                outcome = _take_all(file.read(), take)
                _put_away(path, outcome)
        except (BlockingIOError, FileNotFoundError):
            continue  # its producer lives, or another adopter was faster
        except OSError as error:
            log.error("spool left where it is", file=path.name, error=type(error).__name__)  # noqa: TRY400  # no traceback needed
            continue
        count += outcome.taken
    return count


def _orphan(path: Path) -> IO[bytes]:
    """Raises BlockingIOError when its producer lives, also when compaction has just replaced the file."""
    file = open_locked(path)
    with suppress(FileNotFoundError):
        if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
            return file
    file.close()
    raise BlockingIOError


def _take_all(data: bytes, take: Callable[[Adopted], bool]) -> _Outcome:
    outcome = _Outcome()
    for record in _live_records(data, outcome):
        try:
            safe = take(record)
        except Exception as error:
            log.exception("record cannot be adopted", held=record.held, error=type(error).__name__)
            outcome.refused += 1
        else:
            outcome.taken += 1
            outcome.unsafe += not safe
    return outcome


def _live_records(data: bytes, outcome: _Outcome) -> Iterator[Adopted]:
    held: dict[bytes, bytes] = {}
    for found in frames(data):
        if isinstance(found, int):
            outcome.gaps += 1
            outcome.lost_bytes += found
            continue
        kind, key, payload = found
        if kind == HELD:
            held[key] = payload
        else:
            held.pop(key, None)
            yield Adopted(payload=payload, held=False)
    yield from (Adopted(payload=payload, held=True) for payload in held.values())


def _put_away(path: Path, outcome: _Outcome) -> None:
    path.with_suffix(UNFINISHED).unlink(missing_ok=True)
    if outcome.unsafe:
        log.warning("spool stays: the disk has no room to adopt it", file=path.name, records=outcome.taken)
    elif outcome.refused or outcome.gaps:
        kept = path.rename(path.with_suffix(DAMAGED))
        log.error(
            "spool was damaged and is kept",
            file=kept.name,
            adopted=outcome.taken,
            refused=outcome.refused,
            gaps=outcome.gaps,
            lost_bytes=outcome.lost_bytes,
        )
    else:
        path.unlink()
