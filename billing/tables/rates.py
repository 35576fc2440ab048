"""What a request is charged and what an hour of a device costs. Prices and rates are appended, never changed."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Identity,
    Index,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)

from billing.tables.base import Moment, Money, metadata, moments, optional, texts

_AMOUNTS: Final = ("input", "cached_input", "output", "request", "device_second")


def _sane(column: str) -> str:
    """Amounts stay short enough for exact products: 18 decimals, below a billion."""
    return f"coalesce({column} >= 0 AND {column} < 1000000000 AND scale({column}) <= 18, true)"


prices: Final = Table(
    "prices",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("model", Text, nullable=False),
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), nullable=True),  # NULL: for every tenant without its own
    *moments("effective_from"),
    Column("input", Money, nullable=False),  # per token
    Column("cached_input", Money, nullable=True),  # per token; NULL: as input
    Column("output", Money, nullable=False),  # per token
    Column("request", Money, nullable=False, server_default=text("0")),
    Column("device_second", Money, nullable=False, server_default=text("0")),
    Column("currency", Text, nullable=False),
    Column("example", Boolean, nullable=False, server_default=text("false")),
    Column("created_at", Moment, nullable=False, server_default=text("now()")),
    UniqueConstraint("model", "tenant_id", "effective_from", postgresql_nulls_not_distinct=True),
    CheckConstraint(" AND ".join(_sane(column) for column in _AMOUNTS), name="amounts"),
)

devices: Final = Table(
    "devices",
    metadata,
    Column("name", Text, primary_key=True),  # as its worker says, e.g. "host-a/cpu"
    *texts("kind"),  # what a rate is set for, e.g. "cpu", "nvidia-h200"
    *moments("owned_from"),
    *optional(Moment, "owned_to"),
)

device_rates: Final = Table(
    "device_rates",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    *optional(Text, "device_kind", "device"),  # one of the two: a rate for the kind, or for one device before its kind
    Column("hourly", Money, nullable=False),
    Column("currency", Text, nullable=False),
    *moments("effective_from"),
    Column("example", Boolean, nullable=False, server_default=text("false")),
    Column("created_at", Moment, nullable=False, server_default=text("now()")),
    UniqueConstraint("device_kind", "device", "effective_from", postgresql_nulls_not_distinct=True),
    CheckConstraint("num_nonnulls(device_kind, device) = 1", name="subject"),
    CheckConstraint(_sane("hourly"), name="hourly"),
    Index(None, "device"),
)
