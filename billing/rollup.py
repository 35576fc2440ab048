"""Sums by quarter of an hour, computed anew from the journal for every quarter that something new fell into.

Whoever writes a row of the journal marks its quarter dirty in the same transaction, by adding a row that nobody
updates. The rollup removes the marks it sees and only then reads the journal, so a mark made meanwhile stays for the
next time, and nobody waits for anybody.

A request counts in the quarter in which it finished. An interval of a device is cut at the quarters it spans: each of
its parts in proportion to the time, in whole nanoseconds that add up to the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import Connection, text

from billing.database import Turn, try_turn
from billing.histograms import bucket_sql, counts_sql
from billing.lookups import rate_in_force

QUARTER: Final = timedelta(minutes=15)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATENCIES: Final = ("queue", "ttft", "tpot", "total")
_NS_COLUMNS: Final = ("busy_ns", "idle_ns", "loading_ns", "waste_ns", "overhead_ns")


def quarter_of(moment: datetime) -> datetime:
    """Start of the quarter of an hour that ``moment`` lies in."""
    return moment.astimezone(UTC) - (moment - _EPOCH) % QUARTER


def next_quarter(moment: datetime) -> datetime:
    """``moment`` if it starts a quarter, else the start of the next."""
    start = quarter_of(moment)
    return start if start == moment else start + QUARTER


def mark_usage(connection: Connection, finished: Iterable[datetime]) -> None:
    _mark(connection, "usage", {quarter_of(moment) for moment in finished})


def mark_devices(connection: Connection, spans: Iterable[tuple[datetime, datetime]]) -> None:
    quarters = set()
    for start, end in spans:
        quarter = quarter_of(start)
        while quarter < end:
            quarters.add(quarter)
            quarter += QUARTER
    _mark(connection, "device", quarters)


def mark_devices_since(connection: Connection, since: datetime) -> None:
    """Every quarter from ``since`` on that has device time: a rate for it has changed."""
    connection.execute(
        text("INSERT INTO dirty_buckets SELECT DISTINCT 'device', bucket FROM device_15m WHERE bucket >= :since"),
        {"since": quarter_of(since)},
    )


def _mark(connection: Connection, rollup: str, quarters: Iterable[datetime]) -> None:
    rows = [{"rollup": rollup, "bucket": quarter} for quarter in sorted(quarters)]
    if rows:
        connection.execute(text("INSERT INTO dirty_buckets (rollup, bucket) VALUES (:rollup, :bucket)"), rows)


def roll_up(connection: Connection, *, limit: int = 100) -> int:
    """Recompute up to ``limit`` dirty buckets, newest first. Returns how many; 0 also while another does it."""
    if not try_turn(connection, Turn.ROLLUP):
        return 0
    taken = connection.execute(_TAKE, {"limit": limit}).all()
    for row in taken:
        recompute = _recompute_usage if row.rollup == "usage" else _recompute_devices
        recompute(connection, {"start": row.bucket, "end": row.bucket + QUARTER})
    return len(taken)


def dirty(connection: Connection, start: datetime, end: datetime) -> int:
    """How many buckets in [start, end) wait for the rollup."""
    return int(
        connection.scalar(
            text("SELECT count(DISTINCT (rollup, bucket)) FROM dirty_buckets WHERE bucket >= :start AND bucket < :end"),
            {"start": start, "end": end},
        )
        or 0
    )


def _recompute_usage(connection: Connection, span: dict[str, datetime]) -> None:
    connection.execute(text("DELETE FROM usage_15m WHERE bucket = :start"), span)
    connection.execute(_USAGE, span)


def _recompute_devices(connection: Connection, span: dict[str, datetime]) -> None:
    connection.execute(text("DELETE FROM device_15m WHERE bucket = :start"), span)
    connection.execute(_DEVICES, span)


_TAKE: Final = text("""
WITH chosen AS (SELECT DISTINCT rollup, bucket FROM dirty_buckets ORDER BY bucket DESC, rollup LIMIT :limit),
     taken AS (
         DELETE FROM dirty_buckets d USING chosen c WHERE d.rollup = c.rollup AND d.bucket = c.bucket
         RETURNING d.rollup, d.bucket)
SELECT DISTINCT rollup, bucket FROM taken
""")

_USAGE: Final = text(f"""
INSERT INTO usage_15m
SELECT :start, tenant_id, api_key_id, model, deployment_id, arm, endpoint, stream, status, batch, cost_basis,
       count(*), sum(attempts),
       sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens), sum(generated_tokens), sum(delivered_tokens),
       coalesce(sum(price), 0), coalesce(sum(cost), 0), sum(device_seconds), sum(waste_seconds),
       count(*) FILTER (WHERE price IS NULL AND price_id IS NULL),
       count(*) FILTER (WHERE cost IS NULL AND NOT pending),
       count(*) FILTER (WHERE pending),
       {", ".join(counts_sql(f"{name}_bucket") for name in _LATENCIES)},
       count(*) FILTER (WHERE example), coalesce(sum(price) FILTER (WHERE example), 0)
FROM (
    SELECT *, batch_id IS NOT NULL AS batch,
           {", ".join(f"{bucket_sql(f'{name}_seconds')} AS {name}_bucket" for name in _LATENCIES)},
           coalesce((SELECT p.example FROM prices p WHERE p.id = r.price_id), false) AS example
    FROM requests r WHERE finished_at >= :start AND finished_at < :end
    OFFSET 0
) finished
GROUP BY tenant_id, api_key_id, model, deployment_id, arm, endpoint, stream, status, batch, cost_basis
""")

# Of an interval of ``span`` microseconds, the part from ``low`` to ``high`` lies in the bucket.
_DEVICES: Final = text(f"""
INSERT INTO device_15m
SELECT :start, device, device_kind, deployment_id, rate_id,
       sum(div(wall_ns * high, span) - div(wall_ns * low, span)),
       {", ".join(f"sum(div({name} * high, span) - div({name} * low, span))" for name in _NS_COLUMNS)}
FROM (
    SELECT i.*, CAST(end_ns - start_ns AS numeric) AS wall_ns, rate.id AS rate_id,
           CAST(extract(epoch FROM ended_at - started_at) * 1000000 AS numeric) AS span,
           CAST(extract(epoch FROM greatest(started_at, :start) - started_at) * 1000000 AS numeric) AS low,
           CAST(extract(epoch FROM least(ended_at, :end) - started_at) * 1000000 AS numeric) AS high
    FROM device_intervals i
    LEFT JOIN LATERAL {rate_in_force("i.device", "i.device_kind", "i.ended_at")} rate ON true
    WHERE i.ended_at > :start AND i.started_at < :end AND i.ended_at > i.started_at
) cut
GROUP BY device, device_kind, deployment_id, rate_id
""")
