"""The same sums over time: points of a chart, and quantiles of the latencies."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, text

from billing.histograms import SIZE, quantile
from billing.rating import per_hour
from billing.rollup import QUARTER, next_quarter, quarter_of

_STEPS: Final = (
    QUARTER,
    *(timedelta(hours=hours) for hours in (0.5, 1, 2, 3, 6, 12)),
    *(timedelta(days=days) for days in (1, 2, 5, 10, 30, 100)),
)
_SHARES: Final = (Decimal("0.5"), Decimal("0.95"), Decimal("0.99"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Sums of one stretch of time."""

    start: datetime
    end: datetime
    requests: int
    tokens: int
    revenue: Decimal
    cost: Decimal  # usage basis
    loaded_cost: Decimal  # all device time of the stretch


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds; None where nothing was measured."""

    p50: Decimal | None
    p95: Decimal | None
    p99: Decimal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    queue: Quantiles
    ttft: Quantiles
    tpot: Quantiles
    total: Quantiles


def points(connection: Connection, start: datetime, end: datetime, *, at_most: int = 100) -> list[Point]:
    """[start, end), widened to quarters, in equal stretches without a gap; the first and last may reach over it."""
    start, end = quarter_of(start), next_quarter(end)
    step = next((step for step in _STEPS if (end - start) / step <= at_most), _STEPS[-1])
    rows = connection.execute(_POINTS, {"start": start, "end": end, "step": step})
    return [
        Point(
            start=row.start,
            end=row.start + step,
            requests=int(row.requests),
            tokens=int(row.tokens),
            revenue=row.revenue,
            cost=row.cost,
            loaded_cost=per_hour(row.product),
        )
        for row in rows
    ]


def latencies(
    connection: Connection, start: datetime, end: datetime, *, tenant_id: UUID | None = None, model: str | None = None
) -> Latencies:
    """Of the requests that finished in [start, end), widened to quarters."""
    found = {name: [0] * SIZE for name in Latencies.__dataclass_fields__}
    span = {"start": quarter_of(start), "end": next_quarter(end), "tenant": tenant_id, "model": model}
    for row in connection.execute(_HISTOGRAMS, span):
        found[row.name][row.place - 1] = int(row.counted)
    return Latencies(
        **{name: Quantiles(*(quantile(counts, share) for share in _SHARES)) for name, counts in found.items()}
    )


_POINTS: Final = text("""
SELECT s.start, coalesce(u.requests, 0) AS requests, coalesce(u.tokens, 0) AS tokens,
       coalesce(u.revenue, 0) AS revenue, coalesce(u.cost, 0) AS cost, coalesce(d.product, 0) AS product
FROM generate_series(date_bin(CAST(:step AS interval), :start, 'epoch'), :end - interval '1 microsecond',
                     CAST(:step AS interval)) AS s(start)
LEFT JOIN (
    SELECT date_bin(CAST(:step AS interval), bucket, 'epoch') AS start, sum(requests) AS requests,
           sum(prompt_tokens + completion_tokens) AS tokens, sum(price) AS revenue, sum(cost) AS cost
    FROM usage_15m WHERE bucket >= :start AND bucket < :end GROUP BY 1
) u ON u.start = s.start
LEFT JOIN (
    SELECT date_bin(CAST(:step AS interval), bucket, 'epoch') AS start, sum(wall_ns * hourly) AS product
    FROM device_15m JOIN device_rates r ON r.id = rate_id WHERE bucket >= :start AND bucket < :end GROUP BY 1
) d ON d.start = s.start
ORDER BY s.start
""")

_HISTOGRAMS: Final = text("""
SELECT h.name, c.place, sum(c.counted) AS counted
FROM usage_15m u
CROSS JOIN LATERAL (VALUES ('queue', u.queue_histogram), ('ttft', u.ttft_histogram),
                           ('tpot', u.tpot_histogram), ('total', u.total_histogram)) AS h(name, counts)
CROSS JOIN LATERAL unnest(h.counts) WITH ORDINALITY AS c(counted, place)
WHERE u.bucket >= :start AND u.bucket < :end AND c.counted > 0
      AND (CAST(:tenant AS uuid) IS NULL OR u.tenant_id = :tenant)
      AND (CAST(:model AS text) IS NULL OR u.model = :model)
GROUP BY h.name, c.place
""")
