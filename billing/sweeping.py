"""Close what nobody will close any more: requests without a settlement, attempts without a report.

A half that is missing after its grace is written down in its author's place. If the author speaks up later after all,
its word replaces ours (billing/recording.py), so sweeping too early heals by itself and sweeping twice does nothing.

* A request whose owner never settled it is ``failed`` at price 0, with what its attempts reported. Grace counts from
  its deadline, and from when the report was written here: an hour without Postgres makes nothing old.
* An attempt that its worker never reported is LOST, with the time that the owner last saw. If it served the client that
  time was used, and is its cost; else it is waste, cause "lost".
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Row, text

from billing.database import Turn, take_turn
from billing.recording import record
from billing.records import FAILED, LOST, Attempt, Origin, Settlement

OWNER_LOST: Final = "owner_lost"  # error_code of a request settled here
_AT_ONCE: Final = 500

_UNSETTLED: Final = text("""
SELECT w.request_id, w.origin, a.*
FROM (
    SELECT * FROM awaiting_settlement
    WHERE greatest(deadline, recorded_at) + :grace < :now ORDER BY request_id LIMIT :limit
) w
CROSS JOIN LATERAL (
    SELECT max(finished_at) AS finished_at, max(prompt_tokens + cached_tokens) AS prompt_tokens,
           max(cached_tokens) AS cached_tokens, sum(generated_tokens) AS generated_tokens
    FROM attempts WHERE attempts.request_id = w.request_id
) a
""")

_UNREPORTED: Final = text("""
SELECT w.*, r.finished_at, w.attempt IS NOT DISTINCT FROM r.serving_attempt AS served
FROM awaiting_report w JOIN requests r ON r.id = w.request_id
WHERE w.recorded_at + :grace < :now ORDER BY w.request_id, w.attempt LIMIT :limit
""")


@dataclass(frozen=True, slots=True)
class Swept:
    requests: int  # settled as failed
    attempts: int  # booked as lost


def sweep(connection: Connection, *, grace: timedelta, now: datetime | None = None) -> Swept:
    """Close up to 500 of each kind that are over their grace. Returns how many; call again while it finds any."""
    take_turn(connection, Turn.RECORDING)
    over = {"grace": grace, "now": now or datetime.now(UTC), "limit": _AT_ONCE}
    settlements = [_settlement(row) for row in connection.execute(_UNSETTLED, over)]
    attempts = [_lost(row) for row in connection.execute(_UNREPORTED, over)]
    booked = record(connection, settlements=settlements, attempts=attempts)
    return Swept(requests=booked.requests, attempts=booked.attempts)


def _settlement(row: Row[Any]) -> Settlement:
    origin = _origin(row.origin)
    finished_at = row.finished_at or origin.deadline
    return Settlement(
        request_id=row.request_id,
        origin=origin,
        status=FAILED,
        finish_reason="error",
        error_code=OWNER_LOST,
        prompt_tokens=row.prompt_tokens or 0,
        cached_tokens=row.cached_tokens or 0,
        generated_tokens=row.generated_tokens or 0,
        total_ns=max(0, (finished_at - origin.created_at) // timedelta(microseconds=1) * 1000),
        finished_at=finished_at,
        swept=True,
    )


def _lost(row: Row[Any]) -> Attempt:
    return Attempt(
        request_id=row.request_id,
        attempt=row.attempt,
        origin=None,
        worker=row.worker,
        device=row.device,
        device_kind=row.device_kind,
        outcome=LOST,
        finished_at=row.finished_at,
        used_ns=row.device_ns if row.served else 0,
        wasted_ns={} if row.served else {LOST: row.device_ns},
    )


def _origin(stored: dict[str, Any]) -> Origin:
    """As billing/recording.py stored it."""
    ids = {name: UUID(stored[name]) for name in ("tenant_id", "api_key_id")}
    batch_id = UUID(stored["batch_id"]) if stored["batch_id"] else None
    times = {name: datetime.fromisoformat(stored[name]) for name in ("created_at", "deadline")}
    return Origin(**{**stored, **ids, **times, "batch_id": batch_id})
