"""Read-only transactions on the books, and what a reader is told when they cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import streamlit as st
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from billing.database import DatabaseUnavailable, open_database, transaction

_RETRY: Final = "3s"
_READ_ONLY: Final = "-c default_transaction_read_only=on -c statement_timeout=15s"
_TOO_LONG: Final = "57014"  # query_canceled, by our statement_timeout
_NO_TABLE: Final = frozenset({"42P01", "42703"})  # undefined_table, undefined_column


@st.cache_resource(show_spinner=False)
def _engine(url: str) -> Engine:
    options = f"{conninfo_to_dict(url).get('options', '')} {_READ_ONLY}".strip()
    return open_database(make_conninfo(url, options=options, connect_timeout=3))


@contextmanager
def reading(url: str) -> Iterator[Connection]:
    """Raises billing.database.DatabaseUnavailable; ``guarded`` turns it into a note."""
    with transaction(_engine(url)) as connection:
        yield connection


def guarded(show: Callable[[], None]) -> None:
    """Run a page or a part of it. What the database cannot give becomes a note that goes away by itself."""
    try:
        show()
    except DatabaseUnavailable as error:
        state = _state(error)
        if state == _TOO_LONG:
            st.warning("This took longer than 15 seconds. Choose a shorter time range.", icon=":material/hourglass:")
            return
        if state in _NO_TABLE:
            _note_no_tables()
        else:
            _note_away()
        _retry()


def _state(error: DatabaseUnavailable) -> str | None:
    cause = error.__cause__
    return getattr(cause.orig if isinstance(cause, DBAPIError) else cause, "sqlstate", None)


def _note_no_tables() -> None:
    st.info(
        "**This database has no books yet.** Start `pennyweight up`, or run `alembic upgrade head` on it. "
        "This page looks again every few seconds.",
        icon=":material/database:",
    )


def _note_away() -> None:
    st.warning(
        "**The database does not answer.** Nothing is lost: records wait until it is back. Check that PostgreSQL runs "
        "and that `PENNYWEIGHT_DATABASE_URL` names it. This page looks again every few seconds.",
        icon=":material/cloud_off:",
    )


def _retry() -> None:
    """Run the whole app again after a few seconds: the first run of the timer is ours, the second is the clock's."""
    st.session_state["retry-armed"] = False
    _timer()


@st.fragment(run_every=_RETRY)
def _timer() -> None:
    if st.session_state["retry-armed"]:
        st.rerun(scope="app")
    st.session_state["retry-armed"] = True
