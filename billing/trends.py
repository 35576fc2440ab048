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
EXACT_UP_TO: Final = 50_000  # requests; sorting these takes Postgres a fraction of a second
_STAGES: Final = {"queue": "true", "ttft": "stream", "tpot": "stream", "total": "true"}  # and of which requests
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

    counted: int  # requests
    p50: Decimal | None
    p95: Decimal | None
    p99: Decimal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """First token and time per token are of streamed requests: one that is not sends all its tokens at once."""

    exact: bool  # each quantile is some request's own time; else within histograms.ERROR
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
    """Of the requests that finished in [start, end), widened to quarters.

    Up to EXACT_UP_TO of them are looked up one by one; of more there are the counts by bucket.
    """
    span: dict[str, object] = {
        "start": quarter_of(start),
        "end": next_quarter(end),
        "tenant": tenant_id,
        "model": model,
    }
    exact = (connection.scalar(_COUNT, span) or 0) <= EXACT_UP_TO
    return Latencies(exact=exact, **(_looked_up(connection, span) if exact else _estimated(connection, span)))


def _looked_up(connection: Connection, span: dict[str, object]) -> dict[str, Quantiles]:
    row = connection.execute(_EXACT, {**span, "shares": list(_SHARES)}).one()
    nothing = [None] * len(_SHARES)
    return {name: Quantiles(int(getattr(row, f"{name}_counted")), *(getattr(row, name) or nothing)) for name in _STAGES}


def _estimated(connection: Connection, span: dict[str, object]) -> dict[str, Quantiles]:
    found = {name: [0] * SIZE for name in _STAGES}
    for row in connection.execute(_HISTOGRAMS, span):
        found[row.name][row.place - 1] = int(row.counted)
    return {
        name: Quantiles(sum(counts), *(quantile(counts, share) for share in _SHARES)) for name, counts in found.items()
    }


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

_CHOSEN: Final = """(CAST(:tenant AS uuid) IS NULL OR tenant_id = :tenant)
      AND (CAST(:model AS text) IS NULL OR model = :model)"""

_COUNT: Final = text(f"""
SELECT sum(requests) FROM usage_15m WHERE bucket >= :start AND bucket < :end AND {_CHOSEN}
""")


def _exact_sql(name: str, which: str) -> str:
    order = f"percentile_disc(CAST(:shares AS float8[])) WITHIN GROUP (ORDER BY {name}_seconds)"
    return f"{order} FILTER (WHERE {which}) AS {name}, count({name}_seconds) FILTER (WHERE {which}) AS {name}_counted"


_EXACT: Final = text(f"""
SELECT {", ".join(_exact_sql(name, which) for name, which in _STAGES.items())}
FROM requests WHERE finished_at >= :start AND finished_at < :end AND {_CHOSEN}
""")

_HISTOGRAMS: Final = text(f"""
SELECT h.name, c.place, sum(c.counted) AS counted
FROM usage_15m
CROSS JOIN LATERAL (VALUES {", ".join(f"('{name}', {name}_histogram, {which})" for name, which in _STAGES.items())})
     AS h(name, counts, wanted)
CROSS JOIN LATERAL unnest(h.counts) WITH ORDINALITY AS c(counted, place)
WHERE bucket >= :start AND bucket < :end AND c.counted > 0 AND h.wanted AND {_CHOSEN}
GROUP BY h.name, c.place
""")
