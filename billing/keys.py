"""API keys: made, revoked, listed, and recognised in one query.

A key is ``pw-`` and 256 random bits. Only its SHA-256 rests in the database, beside a prefix by which people know it
again. A plain hash is right here: salts and slow hashes protect secrets that can be guessed, and these cannot; and it
is what lets a key be found by an index.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, Row, text

from billing.changes import log_change
from billing.ids import uuid7
from billing.moments import bounded
from billing.tenants import Limits

_START: Final = "pw-"
_PREFIX_LENGTH: Final = 11
_NAME_LENGTH: Final = 100


class UnknownKeyError(Exception):
    """A key cannot be found or is ambiguous; the message says what to do."""


class Scope(StrEnum):
    INFERENCE = "inference"  # call models, for a tenant
    ADMIN = "admin"  # operate the service


class KeyRefusal(StrEnum):
    """Why a known key is not accepted."""

    REVOKED = "revoked"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who a key stands for: all that the front door needs. ``refusal`` is None for a key that is good."""

    key_id: UUID
    key_name: str
    prefix: str
    scopes: frozenset[Scope]
    key_limits: Limits
    tenant_id: UUID | None  # None: the operator
    tenant_name: str | None
    tenant_limits: Limits
    weight: float
    expires_at: datetime | None
    refusal: KeyRefusal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    id: UUID
    tenant_name: str | None
    name: str
    prefix: str
    scopes: tuple[str, ...]
    limits: Limits
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    id: UUID
    prefix: str
    secret: str  # shown once


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def new_secret(start: str = _START) -> str:
    return start + secrets.token_urlsafe(32)


def create_key(
    connection: Connection,
    *,
    tenant_id: UUID | None,
    name: str,
    scopes: Sequence[Scope] = (Scope.INFERENCE,),
    limits: Limits | None = None,
    expires_at: datetime | None = None,
    actor: str,
) -> NewKey:
    """A key of ``tenant_id``; None makes the operator's own, for which ``scopes`` must be ADMIN alone.

    Raises ValueError for a name or an end that can't be kept.
    """
    if len(name) > _NAME_LENGTH or not name.isprintable():
        raise ValueError(f"A key's name has at most {_NAME_LENGTH} printable characters.")
    expires_at = None if expires_at is None else bounded(expires_at)
    key_id, secret, limits = uuid7(), new_secret(), limits or Limits()
    prefix = secret[:_PREFIX_LENGTH]
    connection.execute(
        text(
            "INSERT INTO api_keys (id, tenant_id, name, prefix, secret_hash, scopes, rpm, tpm, concurrency, expires_at)"
            " VALUES (:id, :tenant_id, :name, :prefix, :hash, :scopes, :rpm, :tpm, :concurrency, :expires_at)"
        ),
        {
            "id": key_id,
            "tenant_id": tenant_id,
            "name": name,
            "prefix": prefix,
            "hash": digest(secret),
            "scopes": [str(scope) for scope in scopes],
            "expires_at": expires_at,
            **asdict(limits),
        },
    )
    log_change(connection, actor, "key.create", subject=str(key_id), prefix=prefix, name=name, **asdict(limits))
    return NewKey(id=key_id, prefix=prefix, secret=secret)


_AUTHENTICATE: Final = text("""
SELECT k.id, k.name, k.prefix, k.scopes, k.rpm, k.tpm, k.concurrency, k.expires_at, k.tenant_id,
       k.revoked_at <= now() AS revoked, k.expires_at <= now() AS expired,
       t.name AS tenant_name, t.rpm AS tenant_rpm, t.tpm AS tenant_tpm, t.concurrency AS tenant_concurrency,
       coalesce(t.weight, 1) AS weight
FROM api_keys k LEFT JOIN tenants t ON t.id = k.tenant_id
WHERE k.secret_hash = :hash
""")


def authenticate(connection: Connection, secret: str) -> Principal | None:
    """Who ``secret`` stands for; None for a key that was never made. Look at ``refusal`` before serving it."""
    row = connection.execute(_AUTHENTICATE, {"hash": digest(secret)}).one_or_none()
    if row is None:
        return None
    return Principal(
        key_id=row.id,
        key_name=row.name,
        prefix=row.prefix,
        scopes=frozenset(Scope(scope) for scope in row.scopes),
        key_limits=Limits(rpm=row.rpm, tpm=row.tpm, concurrency=row.concurrency),
        tenant_id=row.tenant_id,
        tenant_name=row.tenant_name,
        tenant_limits=Limits(rpm=row.tenant_rpm, tpm=row.tenant_tpm, concurrency=row.tenant_concurrency),
        weight=row.weight,
        expires_at=row.expires_at,
        refusal=KeyRefusal.REVOKED if row.revoked else KeyRefusal.EXPIRED if row.expired else None,
    )


def revoke_key(connection: Connection, prefix: str, *, actor: str) -> ApiKey:
    """Revoke the one key whose visible prefix starts with ``prefix``, or that has this id. Raises UnknownKeyError."""
    matching = [key for key in list_keys(connection) if key.prefix.startswith(prefix) or str(key.id) == prefix.lower()]
    if len(matching) != 1 or not prefix:
        found = "No key" if not matching else f"{len(matching)} keys"
        raise UnknownKeyError(f"{found} match {prefix!r}: give more of it. `pennyweight key list` shows all.")
    connection.execute(
        text("UPDATE api_keys SET revoked_at = coalesce(revoked_at, now()) WHERE id = :id"), {"id": matching[0].id}
    )
    log_change(connection, actor, "key.revoke", subject=str(matching[0].id), prefix=matching[0].prefix)
    return matching[0]


def list_keys(connection: Connection, *, tenant_id: UUID | None = None) -> list[ApiKey]:
    """Newest first; of every tenant and the operator, or of one tenant."""
    rows = connection.execute(
        text(
            "SELECT k.*, t.name AS tenant_name FROM api_keys k LEFT JOIN tenants t ON t.id = k.tenant_id "
            "WHERE CAST(:tenant_id AS uuid) IS NULL OR k.tenant_id = :tenant_id ORDER BY k.id DESC"
        ),
        {"tenant_id": tenant_id},
    )
    return [_api_key(row) for row in rows]


def _api_key(row: Row[tuple[object, ...]]) -> ApiKey:
    return ApiKey(
        id=row.id,
        tenant_name=row.tenant_name,
        name=row.name,
        prefix=row.prefix,
        scopes=tuple(row.scopes),
        limits=Limits(rpm=row.rpm, tpm=row.tpm, concurrency=row.concurrency),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
    )
