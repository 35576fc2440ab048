"""Logins to the dashboard: a link that works once, or the operator's key, each worth a session until it expires.

Tokens and sessions are 256 random bits; only their SHA-256 rests here (see billing/keys.py for why that is enough).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, text

from billing.keys import digest, new_secret

LINK_LASTS: Final = timedelta(days=1)
SESSION_LASTS: Final = timedelta(days=7)


def new_login_token(connection: Connection, *, lasts: timedelta = LINK_LASTS) -> str:
    """The secret of a login link."""
    token = new_secret("pwl-")
    connection.execute(
        text(
            "INSERT INTO login_tokens (token_hash, created_at, expires_at) "
            "VALUES (:hash, clock_timestamp(), clock_timestamp() + :lasts)"
        ),
        {"hash": digest(token), "lasts": lasts},
    )
    return token


def redeem(connection: Connection, token: str) -> str | None:
    """A session for a token that is good, which then is no more; None for any other. Two at once: one wins."""
    used = connection.execute(
        text(
            "UPDATE login_tokens SET used_at = clock_timestamp() "
            "WHERE token_hash = :hash AND used_at IS NULL AND expires_at > clock_timestamp()"
        ),
        {"hash": digest(token)},
    )
    return new_session(connection) if used.rowcount else None


def new_session(connection: Connection, *, api_key_id: UUID | None = None) -> str:
    """The secret of a session, for the cookie. ``api_key_id``: the admin key that was shown; it ends with the key."""
    session = new_secret("pws-")
    connection.execute(
        text(
            "INSERT INTO sessions (session_hash, api_key_id, created_at, expires_at) "
            "VALUES (:hash, :key, clock_timestamp(), clock_timestamp() + :lasts)"
        ),
        {"hash": digest(session), "key": api_key_id, "lasts": SESSION_LASTS},
    )
    return session


def session_holds(connection: Connection, session: str) -> bool:
    """Whether the operator is logged in by this session."""
    found = connection.scalar(
        text("""
SELECT EXISTS (
    SELECT FROM sessions s LEFT JOIN api_keys k ON k.id = s.api_key_id
    WHERE s.session_hash = :hash AND s.revoked_at IS NULL AND s.expires_at > clock_timestamp()
      AND k.revoked_at IS NULL AND coalesce(k.expires_at > clock_timestamp(), true)
)"""),
        {"hash": digest(session)},
    )
    return bool(found)


def end_session(connection: Connection, session: str) -> None:
    connection.execute(
        text("UPDATE sessions SET revoked_at = clock_timestamp() WHERE session_hash = :hash AND revoked_at IS NULL"),
        {"hash": digest(session)},
    )


def purge(connection: Connection) -> int:
    """Remove tokens and sessions that have been over for a month. Returns how many."""
    count = 0
    for table in ("login_tokens", "sessions"):
        gone = connection.execute(
            text(f"DELETE FROM {table} WHERE expires_at < clock_timestamp() - interval '30 days'")
        )
        count += gone.rowcount
    return count
