"""A key is shown once, known again by one indexed query, and refused as soon as it is revoked or over."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from billing.keys import KeyRefusal, Scope, UnknownKeyError, authenticate, create_key, digest, list_keys, revoke_key
from billing.tenants import Limits, TenantError, add_tenant, list_tenants, tenant_id_of

LIMITS = Limits(rpm=10, tpm=1000, concurrency=3)


def test_a_secret_tells_all_that_the_front_door_needs_and_rests_nowhere(books):
    tenant = add_tenant(books, "acme", limits=LIMITS, weight=2.5, actor="test")
    key = create_key(books, tenant_id=tenant.id, name="ci", limits=Limits(rpm=5), actor="test")
    who = authenticate(books, key.secret)
    assert (who.tenant_id, who.tenant_name, who.tenant_limits, who.weight) == (tenant.id, "acme", LIMITS, 2.5)
    assert (who.key_id, who.key_name, who.key_limits, who.scopes) == (key.id, "ci", Limits(rpm=5), {Scope.INFERENCE})
    assert who.refusal is None
    assert key.secret.startswith(key.prefix)
    for table in ("api_keys", "audit_log"):
        dump = "\n".join(str(row) for row in books.execute(text(f"SELECT CAST(t AS text) FROM {table} t")))
        assert key.prefix in dump
        assert key.secret not in dump


def test_unknown_revoked_and_expired_keys_are_told_apart(books):
    tenant = add_tenant(books, "acme", actor="test")
    past = datetime.now(UTC) - timedelta(seconds=1)
    expired = create_key(books, tenant_id=tenant.id, name="old", expires_at=past, actor="test")
    revoked = create_key(books, tenant_id=tenant.id, name="bad", actor="test")
    revoke_key(books, revoked.prefix, actor="test")
    assert authenticate(books, "pw-never-made") is None
    assert authenticate(books, expired.secret).refusal is KeyRefusal.EXPIRED
    assert authenticate(books, revoked.secret).refusal is KeyRefusal.REVOKED
    assert [t.keys for t in list_tenants(books)] == [0]
    first = list_keys(books)[0]
    assert revoke_key(books, str(revoked.id), actor="test") == replace(first, revoked_at=first.revoked_at)


def test_a_key_is_recognised_by_an_index(books):
    tenant = add_tenant(books, "acme", actor="test")
    for n in range(500):
        create_key(books, tenant_id=tenant.id, name=str(n), actor="test")
    books.execute(text("ANALYZE api_keys"))
    plan = "\n".join(
        books.scalars(
            text(
                "EXPLAIN SELECT * FROM api_keys k LEFT JOIN tenants t ON t.id = k.tenant_id WHERE secret_hash = :hash"
            ),
            {"hash": digest("pw-x")},
        )
    )
    assert "Index Scan using api_keys_secret_hash_key" in plan
    assert "Seq Scan on api_keys" not in plan


def test_what_matches_no_key_or_several_revokes_none(books):
    tenant = add_tenant(books, "acme", actor="test")
    for name in ("a", "b"):
        create_key(books, tenant_id=tenant.id, name=name, actor="test")
    for prefix in ("pw-", "", "pw-none"):
        with pytest.raises(UnknownKeyError, match="key list"):
            revoke_key(books, prefix, actor="test")
    assert [key.revoked_at for key in list_keys(books, tenant_id=tenant.id)] == [None, None]


def test_a_key_without_a_tenant_is_the_operators_and_calls_no_models(books):
    assert authenticate(books, create_key(books, tenant_id=None, name="", scopes=(Scope.ADMIN,), actor="t").secret)
    with pytest.raises(IntegrityError):
        create_key(books, tenant_id=None, name="", scopes=(Scope.ADMIN, Scope.INFERENCE), actor="test")


def test_tenants_are_found_by_name_or_id_and_bad_ones_are_not_made(books):
    tenant = add_tenant(books, " acme ", actor="test")
    assert tenant_id_of(books, "acme") == tenant_id_of(books, str(tenant.id).upper()) == tenant.id
    for name in ("acme", "", " ", "x" * 101, "a\nb"):
        with pytest.raises(TenantError):
            add_tenant(books, name, actor="test")
    with pytest.raises(TenantError, match="tenant list"):
        tenant_id_of(books, "nobody")
    for weight in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="weight"):
            add_tenant(books, "other", weight=weight, actor="test")
    for limit in (0, -1, 1 << 31):
        with pytest.raises(ValueError, match="limit"):
            Limits(rpm=limit)
