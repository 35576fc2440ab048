"""Texts at rest, and work that may take its time. ``contents`` is the only place where texts of users rest."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    Table,
    Text,
    Uuid,
    text,
)

from billing.tables.base import Moment, integers, metadata, moments, optional, texts, uuids

contents: Final = Table(
    "contents",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), nullable=False),
    Column("sealed", LargeBinary, nullable=False),  # billing/contents.py says how
    Column("created_at", Moment, nullable=False, server_default=text("now()")),
    *moments("expires_at"),
    Index(None, "expires_at"),
)

batches: Final = Table(
    "batches",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), nullable=False),
    Column("api_key_id", Uuid, ForeignKey("api_keys.id"), nullable=False),
    *texts("model", "endpoint"),
    *integers("total_lines", "open_lines"),  # open: pending or running
    Column("created_at", Moment, nullable=False, server_default=text("now()")),
    *moments("expires_at"),  # of its texts
    *optional(Moment, "cancelled_at", "finished_at"),
    CheckConstraint("open_lines BETWEEN 0 AND total_lines", name="open_lines"),
    Index(None, "tenant_id", "id"),
)

batch_lines: Final = Table(
    "batch_lines",
    metadata,
    Column("batch_id", Uuid, ForeignKey("batches.id")),
    Column("line", Integer),  # 1, 2, 3 … as in the input
    *texts("custom_id", "state"),
    *uuids("input_content"),
    *optional(Uuid, "output_content", "request_id"),
    *optional(Text, "claimed_by", "error_code"),
    *optional(Moment, "claimed_until", "finished_at"),
    PrimaryKeyConstraint("batch_id", "line"),
    CheckConstraint("state IN ('pending', 'running', 'done', 'failed', 'cancelled')", name="state"),
    Index(None, "batch_id", "line", postgresql_where=text("state IN ('pending', 'running')")),
)
