"""Records as rows, copied into temporary tables beside their own: COPY is fast, and has no ON CONFLICT."""

from __future__ import annotations

import json
from collections.abc import Iterable
from decimal import Decimal
from typing import Final

import psycopg
from sqlalchemy import Connection, text

from billing.rating import seconds
from billing.records import Attempt, Interval, Settlement

Row = tuple[object, ...]

REQUEST: Final = (
    "id, kind, tenant_id, api_key_id, model, route, arm, deployment_id, revision, endpoint, stream, status, "
    "finish_reason, error_code, prompt_tokens, cached_tokens, completion_tokens, generated_tokens, delivered_tokens, "
    "queue_seconds, ttft_seconds, tpot_seconds, total_seconds, attempts, serving_attempt, batch_id, trace_id, boot_id, "
    "boot_seq, swept, created_at, finished_at"
)
ATTEMPT: Final = (
    "request_id, attempt, worker, device, device_kind, outcome, error, prompt_tokens, cached_tokens, "
    "recomputed_tokens, generated_tokens, drafted_tokens, accepted_tokens, received_at, finished_at, queue_ns, "
    "prefill_ns, decode_ns, used_ns, wasted_ns, waste, kv_block_ns, steps, preemptions, peak_batch, interval"
)
INTERVAL: Final = (
    "worker, device, number, device_kind, deployment_id, started_at, ended_at, start_ns, end_ns, busy_ns, idle_ns, "
    "loading_ns, waste_ns, overhead_ns, open_ns, prompt_tokens, recomputed_tokens, generated_tokens, drafted_tokens, "
    "steps, mixed_tenant_steps, last"
)


def stage_requests(connection: Connection, settlements: Iterable[Settlement]) -> None:
    """Into ``staged_requests``, with the columns REQUEST."""
    _stage(connection, "requests", REQUEST, (_request_row(s) for s in settlements))


def stage_attempts(connection: Connection, attempts: Iterable[Attempt]) -> None:
    """Into ``staged_attempts``, with the columns ATTEMPT."""
    _stage(connection, "attempts", ATTEMPT, (_attempt_row(a) for a in attempts))


def stage_intervals(connection: Connection, intervals: Iterable[Interval]) -> None:
    """Into ``staged_device_intervals``, with the columns INTERVAL."""
    _stage(connection, "device_intervals", INTERVAL, (_interval_row(i) for i in intervals))


def _stage(connection: Connection, table: str, columns: str, rows: Iterable[Row]) -> None:
    connection.execute(
        text(
            f"CREATE TEMPORARY TABLE IF NOT EXISTS staged_{table} ON COMMIT DELETE ROWS AS "
            f"SELECT {columns} FROM {table} WITH NO DATA"
        )
    )
    connection.execute(text(f"DELETE FROM staged_{table}"))  # of an earlier call in the same transaction
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    with driver.cursor() as cursor, cursor.copy(f"COPY staged_{table} ({columns}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)


def _request_row(s: Settlement) -> Row:
    o = s.origin
    return (
        s.request_id, o.kind, o.tenant_id, o.api_key_id, o.model, o.route, o.arm, o.deployment, o.revision, o.endpoint,
        o.stream, s.status, s.finish_reason, s.error_code, s.prompt_tokens, s.cached_tokens, s.billed_tokens,
        s.generated_tokens, s.delivered_tokens, _optional(s.queue_ns), _optional(s.ttft_ns), _optional(s.tpot_ns),
        seconds(s.total_ns), len(s.attempts), s.serving_attempt, o.batch_id, o.trace_id, o.boot_id, o.boot_seq, s.swept,
        o.created_at, s.finished_at,
    )  # fmt: skip


def _attempt_row(a: Attempt) -> Row:
    return (
        a.request_id, a.attempt, a.worker, a.device, a.device_kind, a.outcome, a.error, a.prompt_tokens,
        a.cached_tokens, a.recomputed_tokens, a.generated_tokens, a.drafted_tokens, a.accepted_tokens, a.received_at,
        a.finished_at, a.queue_ns, a.prefill_ns, a.decode_ns, a.used_ns, sum(a.wasted_ns.values()),
        json.dumps(a.wasted_ns), a.kv_block_ns, a.steps, a.preemptions, a.peak_batch, a.interval,
    )  # fmt: skip


def _interval_row(i: Interval) -> Row:
    return (
        i.worker, i.device, i.number, i.device_kind, i.deployment, i.started_at, i.ended_at, i.start_ns, i.end_ns,
        i.busy_ns, i.idle_ns, i.loading_ns, i.waste_ns, i.overhead_ns, i.open_ns, i.prompt_tokens, i.recomputed_tokens,
        i.generated_tokens, i.drafted_tokens, i.steps, i.mixed_tenant_steps, i.last,
    )  # fmt: skip


def _optional(ns: int | None) -> Decimal | None:
    return None if ns is None else seconds(ns)
