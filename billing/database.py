"""The way into Postgres: one engine from one URL, one place that opens a transaction, and the turns processes take.

Everything in billing works on a ``sqlalchemy.Connection`` that is inside a transaction and never commits: whoever opens
the transaction decides what belongs together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

_CONNECT_TIMEOUT_S: Final = 5
_LOCK_TIMEOUT: Final = "10s"
_REFUSALS: Final = (psycopg.DataError, psycopg.IntegrityError)


class DatabaseUnavailable(Exception):  # noqa: N818 - the state that something is in, not a mistake
    """Postgres cannot serve now: away, restarting, full, not migrated, or a lock was not had. Repeating may help."""


class DatabaseOutdated(DatabaseUnavailable):
    """A table or column is not there: the migrations have not run."""


class DatabaseUrlError(ValueError):
    """The URL is none that libpq takes. The message does not quote it."""


class DatabaseRefused(Exception):  # noqa: N818 - as above
    """A value or a row does not fit the tables."""


class Turn(IntEnum):
    """Work of which one transaction at a time may do its part; the numbers are advisory lock keys."""

    RECORDING = 0x70770001  # rows of requests, attempts and intervals, and what follows from them
    ROLLUP = 0x70770002
    PARTITIONS = 0x70770003
    BOOTSTRAP = 0x70770004
    MIGRATION = 0x70770005


def open_database(url: str, *, pool_size: int = 5) -> Engine:
    """An engine for ``url``, which is whatever libpq takes. It connects on first use, and anew after a restart.

    Raises DatabaseUrlError.
    """
    return create_engine(
        "postgresql+psycopg://",  # the URL itself stays out of the engine, and so out of its repr
        creator=_connector(url),
        pool_size=pool_size,
        max_overflow=pool_size,
        pool_pre_ping=True,
        pool_timeout=_CONNECT_TIMEOUT_S,
        hide_parameters=True,  # no value of a row in an error message
    )


def _connector(url: str) -> Callable[[], psycopg.Connection]:
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        raise DatabaseUrlError("not of the form postgresql://user:password@host:port/database") from None
    options = f"{given.get('options') or ''} -c timezone=UTC -c lock_timeout={_LOCK_TIMEOUT}"
    timeout = given.get("connect_timeout") or _CONNECT_TIMEOUT_S
    name = given.get("application_name") or "pennyweight"
    conninfo = make_conninfo(url, options=options.strip(), connect_timeout=timeout, application_name=name)
    return lambda: psycopg.connect(conninfo)


@contextmanager
def transaction(engine: Engine) -> Iterator[Connection]:
    """A transaction: committed at the end, rolled back on any exception.

    Raises DatabaseUnavailable when repeating the whole may help, DatabaseRefused when it does not.
    """
    try:
        with engine.begin() as connection:
            yield connection
    except (DBAPIError, psycopg.Error, PoolTimeout) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        raise _kind(cause)(_reason(cause)) from error


def take_turn(connection: Connection, turn: Turn) -> None:
    """Wait until no other transaction has the turn; it ends with this transaction."""
    connection.execute(text("SELECT pg_advisory_xact_lock(:turn)"), {"turn": int(turn)})


def try_turn(connection: Connection, turn: Turn) -> bool:
    return bool(connection.scalar(text("SELECT pg_try_advisory_xact_lock(:turn)"), {"turn": int(turn)}))


def _kind(cause: BaseException | None) -> type[DatabaseUnavailable | DatabaseRefused]:
    if isinstance(cause, _REFUSALS):
        return DatabaseRefused
    missing = psycopg.errors.UndefinedTable | psycopg.errors.UndefinedColumn
    return DatabaseOutdated if isinstance(cause, missing) else DatabaseUnavailable


def _reason(cause: BaseException | None) -> str:
    """Class and SQLSTATE: a server's message may quote values."""
    state = getattr(cause, "sqlstate", None)
    return f"{type(cause).__name__}{f' {state}' if state else ''}"
