"""Who may do what, and who did: tenants, their keys, the operator's sessions, and the log of changes."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from billing.tables.base import Moment, metadata, moments, optional, texts

_LIMITS: Final = "coalesce(rpm, 1) > 0 AND coalesce(tpm, 1) > 0 AND coalesce(concurrency, 1) > 0"

tenants: Final = Table(
    "tenants",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("name", Text, nullable=False),
    *optional(Integer, "rpm", "tpm", "concurrency"),  # NULL: unlimited
    Column("weight", Double, nullable=False, server_default=text("1")),  # share of the device under contention
    Column("created_at", Moment, nullable=False, server_default=text("now()")),
    UniqueConstraint("name"),
    CheckConstraint(_LIMITS, name="limits"),
    CheckConstraint("weight > 0 AND weight < 'Infinity'", name="weight"),
)

api_keys: Final = Table(
    "api_keys",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), nullable=True),  # NULL: the operator's own
    *texts("name", "prefix"),  # prefix: the visible start of the secret
    Column("secret_hash", LargeBinary, nullable=False),  # SHA-256 of the secret
    Column("scopes", ARRAY(Text), nullable=False),
    *optional(Integer, "rpm", "tpm", "concurrency"),
    Column("created_at", Moment, nullable=False, server_default=text("now()")),
    *optional(Moment, "expires_at", "revoked_at"),
    UniqueConstraint("secret_hash"),
    Index(None, "tenant_id"),
    CheckConstraint(_LIMITS, name="limits"),
    CheckConstraint("scopes <@ '{inference,admin}' AND cardinality(scopes) > 0", name="scopes"),
    CheckConstraint("tenant_id IS NOT NULL OR scopes = '{admin}'", name="owner"),
)

login_tokens: Final = Table(
    "login_tokens",
    metadata,
    Column("token_hash", LargeBinary, primary_key=True),
    *moments("created_at", "expires_at"),
    *optional(Moment, "used_at"),
)

sessions: Final = Table(
    "sessions",
    metadata,
    Column("session_hash", LargeBinary, primary_key=True),
    Column("api_key_id", Uuid, ForeignKey("api_keys.id"), nullable=True),  # the admin key it came from; NULL: a link
    *moments("created_at", "expires_at"),
    *optional(Moment, "revoked_at"),
)

audit_log: Final = Table(
    "audit_log",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("at", Moment, nullable=False, server_default=text("now()")),
    *texts("actor", "action", "subject"),
    Column("detail", JSONB, nullable=False),
)
