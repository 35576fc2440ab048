"""Texts rest sealed: only their tenant's row, with the secret, opens them, and what has expired is gone."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from billing.contents import Seal, SealError, keep, purge
from billing.ids import uuid7
from billing.tenants import add_tenant

LATER = datetime.now(UTC) + timedelta(days=1)


def sealed(books, content_id) -> bytes:
    return books.scalar(text("SELECT sealed FROM contents WHERE id = :id"), {"id": content_id})


def test_a_text_comes_back_only_with_its_secret_its_tenant_and_its_row(books):
    ours, theirs = add_tenant(books, "ours", actor="test").id, add_tenant(books, "theirs", actor="test").id
    seal = Seal("s3cret")
    first, second = keep(books, seal, [b"my words", b"other words"], tenant_id=ours, expires_at=LATER)
    rests = sealed(books, first)
    assert b"my words" not in rests
    assert Seal("s3cret").open(first, ours, rests) == b"my words"
    for opener, content_id, tenant, data in (
        (Seal("another"), first, ours, rests),
        (seal, first, theirs, rests),
        (seal, second, ours, rests),
        (seal, first, ours, rests[:-1] + bytes([rests[-1] ^ 1])),
        (seal, first, ours, b"\x02" + rests[1:]),
        (seal, first, ours, b""),
    ):
        with pytest.raises(SealError):
            opener.open(content_id, tenant, data)
    assert sealed(books, second) != Seal("s3cret").close(second, ours, b"other words"), "a nonce of its own each time"


def test_without_a_secret_nothing_is_kept():
    with pytest.raises(SealError, match="PENNYWEIGHT_SECRET"):
        Seal("")


def test_what_has_expired_is_purged_and_nothing_else(books):
    tenant = add_tenant(books, "ours", actor="test").id
    seal, past = Seal("s"), datetime.now(UTC) - timedelta(seconds=1)
    keep(books, seal, [b"old"] * 3, tenant_id=tenant, expires_at=past)
    (kept,) = keep(books, seal, [b"new"], tenant_id=tenant, expires_at=LATER)
    assert (purge(books), purge(books)) == (3, 0)
    assert sealed(books, kept) is not None
    assert sealed(books, uuid7()) is None
