"""Texts at rest: sealed with a key that the database does not have, each under its own id and tenant, until it expires.

Sealed by AES-256-GCM (NIST SP 800-38D) as ``version byte | nonce, 12 bytes | ciphertext and tag``; the key comes from
the secret by HKDF-SHA256 (RFC 5869). Id and tenant are authenticated with the text, so no row can pass for another.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Final
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from sqlalchemy import Connection, text

from billing.ids import uuid7

_VERSION: Final = b"\x01"
_NONCE_BYTES: Final = 12
_PURPOSE: Final = b"pennyweight contents 1"

_INSERT: Final = text(
    "INSERT INTO contents (id, tenant_id, sealed, expires_at) VALUES (:id, :tenant_id, :sealed, :expires_at)"
)


class SealError(Exception):
    """There is no secret, or a text was sealed with another one."""


class Seal:
    """Seals and opens. Holds the key."""

    def __init__(self, secret: str) -> None:
        """Raises SealError without a secret."""
        if not secret:
            raise SealError(
                "Texts cannot be kept without a secret: set PENNYWEIGHT_SECRET, to the same in all processes."
            )
        self._cipher = AESGCM(HKDF(SHA256(), 32, salt=None, info=_PURPOSE).derive(secret.encode()))

    def close(self, content_id: UUID, tenant_id: UUID, data: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return _VERSION + nonce + self._cipher.encrypt(nonce, data, content_id.bytes + tenant_id.bytes)

    def open(self, content_id: UUID, tenant_id: UUID, sealed: bytes) -> bytes:
        """Raises SealError when the secret is another one, or the row was changed."""
        version, nonce, rest = sealed[:1], sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
        if version != _VERSION or len(nonce) != _NONCE_BYTES:
            raise SealError("A row of contents is none that this version wrote.")
        try:
            return self._cipher.decrypt(nonce, rest, content_id.bytes + tenant_id.bytes)
        except InvalidTag:
            raise SealError("A text was sealed with another PENNYWEIGHT_SECRET, or was changed.") from None


def keep(
    connection: Connection, seal: Seal, texts: Iterable[bytes], *, tenant_id: UUID, expires_at: datetime
) -> list[UUID]:
    """Store texts of a tenant. Returns their ids, in order."""
    sealed = [(content_id, seal.close(content_id, tenant_id, data)) for content_id, data in _named(texts)]
    if sealed:
        common = {"tenant_id": tenant_id, "expires_at": expires_at}
        connection.execute(_INSERT, [{"id": content_id, "sealed": data, **common} for content_id, data in sealed])
    return [content_id for content_id, _ in sealed]


def purge(connection: Connection) -> int:
    """Remove what has expired. Returns how many."""
    return connection.execute(text("DELETE FROM contents WHERE expires_at < now()")).rowcount


def _named(texts: Iterable[bytes]) -> Iterator[tuple[UUID, bytes]]:
    for data in texts:
        yield uuid7(), data
