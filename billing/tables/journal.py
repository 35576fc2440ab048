"""What happened: requests, their attempts, the time of the devices, and what is still awaited.

``requests`` and ``attempts`` are partitioned by month on the request's UUIDv7 itself, so that a repeated record meets
its own primary key whatever the time. Times in ``requests`` are NUMERIC seconds, exact from nanoseconds.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Index,
    Integer,
    PrimaryKeyConstraint,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from billing.tables.base import (
    Moment,
    Money,
    Seconds,
    bigints,
    booleans,
    integers,
    metadata,
    moments,
    optional,
    texts,
    uuids,
)

requests: Final = Table(
    "requests",
    metadata,
    Column("id", Uuid, primary_key=True),
    *texts("kind"),
    *uuids("tenant_id", "api_key_id"),
    *texts("model", "route", "arm", "deployment_id", "revision", "endpoint"),
    *booleans("stream"),
    *texts("status", "finish_reason", "error_code"),
    # completion_tokens are the billed ones
    *integers("prompt_tokens", "cached_tokens", "completion_tokens", "generated_tokens", "delivered_tokens"),
    *optional(Seconds, "queue_seconds", "ttft_seconds", "tpot_seconds"),
    Column("total_seconds", Seconds, nullable=False),
    # These follow from attempts, prices and rates: billing/closing.py computes them whenever one of those comes in.
    Column("device_seconds", Seconds, nullable=False, server_default=text("0")),
    Column("waste_seconds", Seconds, nullable=False, server_default=text("0")),
    *optional(Money, "price", "cost"),  # NULL: pending, unpriced or uncosted
    *optional(Text, "currency"),
    *optional(BigInteger, "price_id"),  # NULL: no price was in force
    Column("cost_basis", Text, nullable=False, server_default=text("'measured'")),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("pending", Boolean, nullable=False, server_default=text("true")),  # the report that cost waits for is out
    *optional(Integer, "serving_attempt"),  # whose device time served the client; other attempts' is waste. NULL: none
    *optional(Uuid, "batch_id"),
    *texts("trace_id", "boot_id"),
    *optional(Integer, "boot_seq"),
    Column("swept", Boolean, nullable=False, server_default=text("false")),  # settled in the owner's place
    *moments("created_at", "finished_at"),
    CheckConstraint("status IN ('completed', 'cancelled', 'failed')", name="status"),
    CheckConstraint("cached_tokens BETWEEN 0 AND prompt_tokens", name="prompt"),
    CheckConstraint(
        "delivered_tokens >= 0 AND generated_tokens >= 0 AND completion_tokens >= 0 AND (completion_tokens = 0 OR "
        "delivered_tokens <= completion_tokens AND completion_tokens <= generated_tokens)",
        name="completion",
    ),
    Index(None, "finished_at"),
    Index(None, "tenant_id", "id"),
    postgresql_partition_by="RANGE (id)",
)

attempts: Final = Table(
    "attempts",
    metadata,
    Column("request_id", Uuid),
    Column("attempt", Integer),
    *texts("worker", "device", "device_kind", "outcome", "error"),
    # Rows the worker computed, by kind; cached ones it did not compute
    *integers("prompt_tokens", "cached_tokens", "recomputed_tokens"),
    *integers("generated_tokens", "drafted_tokens", "accepted_tokens"),
    *optional(Moment, "received_at"),
    *moments("finished_at"),
    *bigints("queue_ns", "prefill_ns", "decode_ns"),
    # Disjoint: used and wasted are this attempt's shares of all steps. ``waste`` is wasted_ns by cause.
    *bigints("used_ns", "wasted_ns"),
    Column("waste", JSONB, nullable=False),
    *bigints("kv_block_ns"),
    *integers("steps", "preemptions", "peak_batch"),
    *optional(Integer, "interval"),  # of the worker, in which it closed. NULL: outcome "lost", nobody reported it
    PrimaryKeyConstraint("request_id", "attempt"),
    CheckConstraint("attempt > 0", name="attempt"),
    Index(None, "worker", "interval"),
    postgresql_partition_by="RANGE (request_id)",
)

device_intervals: Final = Table(
    "device_intervals",
    metadata,
    *texts("worker", "device"),
    *integers("number"),
    *texts("device_kind", "deployment_id"),
    *moments("started_at", "ended_at"),
    *bigints("start_ns", "end_ns"),  # of the worker's monotonic clock; start_ns is end_ns of the interval before
    *bigints("busy_ns", "idle_ns", "loading_ns", "waste_ns", "overhead_ns"),
    *bigints("open_ns"),  # spent by attempts still running at end_ns
    *bigints("prompt_tokens", "recomputed_tokens", "generated_tokens", "drafted_tokens"),
    *bigints("steps", "mixed_tenant_steps"),
    *booleans("last"),
    PrimaryKeyConstraint("worker", "device", "number"),
    CheckConstraint("end_ns >= start_ns", name="span"),
    Index(None, "ended_at"),
)

# Two worklists of the sweeper. A row lives from the first half of a request to its second, mostly for milliseconds.
awaiting_settlement: Final = Table(
    "awaiting_settlement",
    metadata,
    Column("request_id", Uuid, primary_key=True),
    *moments("deadline"),
    Column("origin", JSONB, nullable=False),
    Column("recorded_at", Moment, nullable=False, server_default=text("now()")),
)

awaiting_report: Final = Table(
    "awaiting_report",
    metadata,
    Column("request_id", Uuid),
    Column("attempt", Integer),
    *texts("worker", "device", "device_kind"),
    *bigints("device_ns"),  # used and wasted, as far as the owner saw
    Column("recorded_at", Moment, nullable=False, server_default=text("now()")),
    PrimaryKeyConstraint("request_id", "attempt"),
)
