"""Moments that the books can hold, whatever zone they are said in."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

FIRST: Final = datetime(2000, 1, 1, tzinfo=UTC)
LAST: Final = datetime(9000, 1, 1, tzinfo=UTC)


def bounded(moment: datetime) -> datetime:
    """``moment`` in UTC. Raises ValueError: neither Python nor PostgreSQL can say every moment in every zone."""
    if not FIRST <= moment <= LAST:
        raise ValueError("A time lies between the years 2000 and 9000.")
    return moment.astimezone(UTC)
