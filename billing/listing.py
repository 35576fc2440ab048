"""Requests one by one: a page of a filtered list, newest first, and all that is known of one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, text

from billing.ids import uuid7_floor
from billing.lookups import rate_in_force
from billing.rating import subtract
from billing.rollup import quarter_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Requests made in [start, end): exactly those whose id says so. None: whatever."""

    start: datetime
    end: datetime
    tenant_id: UUID | None = None
    model: str | None = None
    status: str | None = None
    endpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    id: UUID
    kind: str
    tenant_id: UUID
    tenant: str
    key_prefix: str | None
    model: str
    deployment_id: str
    revision: str
    arm: str
    endpoint: str
    stream: bool
    status: str
    finish_reason: str
    error_code: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int  # billed
    generated_tokens: int
    delivered_tokens: int
    queue_seconds: Decimal | None
    ttft_seconds: Decimal | None
    tpot_seconds: Decimal | None
    total_seconds: Decimal
    device_seconds: Decimal
    waste_seconds: Decimal
    price: Decimal | None
    price_id: int | None
    cost: Decimal | None
    currency: str | None
    pending: bool  # its report is still out, so cost is not known yet
    attempts: int
    serving_attempt: int | None
    batch_id: UUID | None
    trace_id: str
    swept: bool
    created_at: datetime
    finished_at: datetime

    @property
    def margin(self) -> Decimal | None:
        return None if self.price is None or self.cost is None else subtract(self.price, self.cost)

    @property
    def unpriced(self) -> bool:
        """No price was in force."""
        return self.price is None and self.price_id is None

    @property
    def uncosted(self) -> bool:
        """Its device has no rate."""
        return self.cost is None and not self.pending


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLine:
    attempt: int
    worker: str
    device: str
    device_kind: str
    outcome: str
    error: str
    prompt_tokens: int  # rows computed; cached ones were not
    cached_tokens: int
    recomputed_tokens: int
    generated_tokens: int
    received_at: datetime | None
    finished_at: datetime
    queue_ns: int
    prefill_ns: int
    decode_ns: int
    used_ns: int
    wasted_ns: int
    waste: dict[str, int]  # wasted_ns by cause
    kv_block_ns: int
    steps: int
    preemptions: int
    peak_batch: int
    hourly: Decimal | None  # the rate its time is costed at


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceLine:
    """The price a request was charged at."""

    id: int
    effective_from: datetime
    input: Decimal
    cached_input: Decimal | None
    output: Decimal
    request: Decimal
    device_second: Decimal
    currency: str
    example: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    request: Request
    attempts: list[AttemptLine]
    price: PriceLine | None


def list_requests(
    connection: Connection, wanted: Filter, *, before: UUID | None = None, limit: int = 50
) -> list[Request]:
    """Newest first. The next page comes with the last one's id as ``before``."""
    low, high = uuid7_floor(wanted.start), uuid7_floor(wanted.end)
    conditions = ["r.id >= :low", "r.id < :high"]
    values: dict[str, object] = {"low": low, "high": min(high, before) if before else high, "limit": limit}
    for column in ("tenant_id", "model", "status", "endpoint"):
        if (value := getattr(wanted, column)) is not None:
            conditions.append(f"r.{column} = :{column}")
            values[column] = value
    rows = connection.execute(
        text(f"{_REQUESTS} WHERE {' AND '.join(conditions)} ORDER BY r.id DESC LIMIT :limit"), values
    )
    return [Request(**row) for row in rows.mappings()]


def get_request(connection: Connection, request_id: UUID) -> Detail | None:
    """None while the books do not have it: not settled yet, or never admitted."""
    found = connection.execute(text(f"{_REQUESTS} WHERE r.id = :id"), {"id": request_id}).mappings().one_or_none()
    if found is None:
        return None
    request = Request(**found)
    attempts = connection.execute(_ATTEMPTS, {"id": request_id}).mappings()
    price = connection.execute(_PRICE, {"id": request.price_id}).mappings().one_or_none()
    return Detail(
        request=request,
        attempts=[AttemptLine(**row) for row in attempts],
        price=PriceLine(**price) if price else None,
    )


def choices(connection: Connection, start: datetime, end: datetime) -> dict[str, list[str]]:
    """What a filter can be set to in a range: models and endpoints that were used."""
    rows = connection.execute(
        text("SELECT DISTINCT model, endpoint FROM usage_15m WHERE bucket >= :start AND bucket < :end"),
        {"start": quarter_of(start), "end": end},
    ).all()
    return {"model": sorted({row.model for row in rows}), "endpoint": sorted({row.endpoint for row in rows})}


_COLUMNS: Final = ", ".join(
    f"r.{name}" for name in Request.__dataclass_fields__ if name not in {"tenant", "key_prefix"}
)
_REQUESTS: Final = f"""
SELECT {_COLUMNS}, coalesce(t.name, CAST(r.tenant_id AS text)) AS tenant, k.prefix AS key_prefix
FROM requests r LEFT JOIN tenants t ON t.id = r.tenant_id LEFT JOIN api_keys k ON k.id = r.api_key_id
"""
_ATTEMPTS: Final = text(f"""
SELECT {", ".join(f"a.{name}" for name in AttemptLine.__dataclass_fields__ if name != "hourly")}, rate.hourly
FROM attempts a
LEFT JOIN LATERAL {rate_in_force("a.device", "a.device_kind", "a.finished_at")} rate ON true
WHERE a.request_id = :id ORDER BY a.attempt
""")
_PRICE: Final = text(f"SELECT {', '.join(PriceLine.__dataclass_fields__)} FROM prices WHERE id = :id")
