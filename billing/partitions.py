"""The monthly partitions of ``requests`` and ``attempts``, made ahead of time and whenever a record needs one.

A partition is a table of its own that is attached afterwards: that takes a lock under which reading and writing the
others goes on, where CREATE TABLE … PARTITION OF would stop everybody.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import Connection, text

from billing.database import Turn, take_turn
from billing.ids import uuid7_floor

PARTITIONED: Final = ("requests", "attempts")
_NAME: Final = re.compile(rf"(?:{'|'.join(PARTITIONED)})_\d{{4}}_\d{{2}}")


def is_partition(table: str) -> bool:
    return _NAME.fullmatch(table) is not None


def month_of(moment: datetime) -> datetime:
    """The first moment of its month, in UTC."""
    return moment.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def next_month(month: datetime) -> datetime:
    return month.replace(year=month.year + month.month // 12, month=month.month % 12 + 1)


def make_ahead(connection: Connection, now: datetime, *, months: int = 2) -> list[str]:
    """Make the partitions of this month, the one before and ``months`` after. Returns the names of new ones."""
    wanted = [month_of(now)]
    while len(wanted) <= months:
        wanted.append(next_month(wanted[-1]))
    last = (wanted[0].month + 10) % 12 + 1
    before = wanted[0].replace(month=last, year=wanted[0].year - (last == 12))
    return make(connection, [before, *wanted])


def make(connection: Connection, months: Iterable[datetime]) -> list[str]:
    """Make what is missing of the partitions of ``months``. Returns the names of new ones."""
    wanted = {f"{table}_{month:%Y_%m}": (table, month) for month in set(months) for table in PARTITIONED}
    if not _missing(connection, wanted):
        return []
    take_turn(connection, Turn.PARTITIONS)
    missing = sorted(_missing(connection, wanted))
    for name in missing:
        _make(connection, name, *wanted[name])
    return missing


def _missing(connection: Connection, names: Iterable[str]) -> set[str]:
    return set(
        connection.scalars(
            text("SELECT name FROM unnest(CAST(:names AS text[])) AS name WHERE to_regclass(name) IS NULL"),
            {"names": list(names)},
        )
    )


def _make(connection: Connection, name: str, table: str, month: datetime) -> None:
    low, high = uuid7_floor(month), uuid7_floor(next_month(month))
    connection.execute(text(f"CREATE TABLE {name} (LIKE {table} INCLUDING ALL)"))
    connection.execute(text(f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES FROM ('{low}') TO ('{high}')"))
