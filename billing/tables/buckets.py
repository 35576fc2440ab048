"""Sums by quarter of an hour, on which every time zone in use can be cut. billing/rollup.py fills them."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Index, PrimaryKeyConstraint, Table, Text, UniqueConstraint, Uuid
from sqlalchemy.dialects.postgresql import ARRAY

from billing.tables.base import Money, Seconds, bigints, booleans, metadata, moments, optional, texts, uuids

# One row per mark, never updated: a mark made while its bucket is recomputed survives.
dirty_buckets: Final = Table(
    "dirty_buckets",
    metadata,
    *texts("rollup"),  # "usage" or "device"
    *moments("bucket"),
)

usage_15m: Final = Table(
    "usage_15m",
    metadata,
    *moments("bucket"),  # start of the quarter in which the requests finished
    *uuids("tenant_id", "api_key_id"),
    *texts("model", "deployment_id", "arm", "endpoint"),
    *booleans("stream"),
    *texts("status"),
    *booleans("batch"),
    *texts("cost_basis"),
    *bigints("requests", "attempts"),
    *bigints("prompt_tokens", "cached_tokens", "completion_tokens", "generated_tokens", "delivered_tokens"),
    Column("price", Money, nullable=False),
    Column("cost", Money, nullable=False),
    Column("device_seconds", Seconds, nullable=False),
    Column("waste_seconds", Seconds, nullable=False),
    *bigints("unpriced", "uncosted", "pending"),  # requests whose price or cost is not in the sums
    # Counts by billing.histograms.BOUNDS
    *[
        Column(name, ARRAY(BigInteger), nullable=False)
        for name in ("queue_histogram", "ttft_histogram", "tpot_histogram", "total_histogram")
    ],
    *bigints("example_priced"),  # requests charged by an example price, and what they were charged
    Column("example_price", Money, nullable=False),
    PrimaryKeyConstraint(
        "bucket",
        "tenant_id",
        "api_key_id",
        "model",
        "deployment_id",
        "arm",
        "endpoint",
        "stream",
        "status",
        "batch",
        "cost_basis",
    ),
)

device_15m: Final = Table(
    "device_15m",
    metadata,
    *moments("bucket"),
    *texts("device", "device_kind", "deployment_id"),
    *optional(BigInteger, "rate_id"),  # the rate in force; a quarter in which it changed has two rows. NULL: uncosted
    *bigints("wall_ns", "busy_ns", "idle_ns", "loading_ns", "waste_ns", "overhead_ns"),
    UniqueConstraint("bucket", "device", "deployment_id", "device_kind", "rate_id", postgresql_nulls_not_distinct=True),
)

refusals_15m: Final = Table(
    "refusals_15m",
    metadata,
    *moments("bucket"),
    *optional(Uuid, "tenant_id", "api_key_id"),  # NULL: the caller was not known
    Column("cause", Text, nullable=False),
    *bigints("refusals"),
    UniqueConstraint("bucket", "tenant_id", "api_key_id", "cause", postgresql_nulls_not_distinct=True),
    Index(None, "tenant_id", "bucket"),
)
