"""Identifiers: UUID version 7 (RFC 9562, section 5.7), so that an id says when it was made and sorts by it.

Owners mint request ids here. Tables that are partitioned by month are partitioned on the id itself, with
``uuid7_floor`` of the month's first moment as bound, and a filter by time becomes a filter by id in the same way.

    48 bits Unix milliseconds | 4 bits version | 12 bits rand_a | 2 bits variant | 62 bits rand_b

Within a process ids only grow: inside one millisecond (or when the clock steps back) the 74 random bits are a counter
that starts at random and grows by a random step, as the RFC's "Monotonic Random" method has it.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_RANDOM_BITS: Final = 74
_RAND_B_BITS: Final = 62
_VERSION: Final = 0x7 << 76
_VARIANT: Final = 0b10 << _RAND_B_BITS
_STEP_BITS: Final = 32


class _Clock:
    """The last id of this process, as (milliseconds, random part)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = (0, 0)

    def next(self) -> tuple[int, int]:
        with self._lock:
            now, (last, random) = time.time_ns() // 1_000_000, self._last
            if now > last:
                self._last = (now, _random(_RANDOM_BITS))
            elif (grown := random + 1 + _random(_STEP_BITS)) >> _RANDOM_BITS:
                self._last = (last + 1, _random(_RANDOM_BITS))
            else:
                self._last = (last, grown)
            return self._last


def uuid7() -> UUID:
    """A new id, greater than every id this process has made before. Safe from several threads."""
    return _build(*_clock.next())


def uuid7_floor(moment: datetime) -> UUID:
    """The least id of the millisecond of ``moment``: an id is at or above it exactly if it was made then or later.

    ``moment`` must be aware. Raises ValueError for a naive one, and for one before 1970.
    """
    if moment.tzinfo is None:
        raise ValueError("uuid7_floor needs an aware datetime")
    milliseconds = (moment - _EPOCH) // timedelta(milliseconds=1)
    if milliseconds < 0:
        raise ValueError("uuid7_floor needs a moment after 1970")
    return _build(milliseconds, 0)


def uuid7_time(identifier: UUID) -> datetime:
    """When ``identifier`` was made, to the millisecond. Raises ValueError if it is not of version 7."""
    if identifier.version != 7:
        raise ValueError("not a UUID of version 7")
    return _EPOCH + timedelta(milliseconds=identifier.int >> 80)


def _random(bits: int) -> int:
    return int.from_bytes(os.urandom(-(-bits // 8))) >> (-bits % 8)


def _build(milliseconds: int, random: int) -> UUID:
    rand_a, rand_b = random >> _RAND_B_BITS, random & ((1 << _RAND_B_BITS) - 1)
    return UUID(int=milliseconds << 80 | _VERSION | rand_a << 64 | _VARIANT | rand_b)


_clock: Final = _Clock()
