"""Write what happened into the books: each record once, whatever the order and however often it comes.

Records are copied into staging tables and inserted from there where their primary key is new; everything else follows
from the rows that were new, in the same transaction. Recorders take turns, so that of a settlement and a report that
two of them write at once, the second always sees the first.

Two words replace an earlier one: the owner's settlement that of the sweeper, and a worker's report a LOST attempt.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, text

from billing.closing import close
from billing.database import Turn, take_turn
from billing.ids import uuid7_time
from billing.partitions import make, month_of
from billing.records import LOST, Attempt, AttemptSeen, Interval, Settlement
from billing.rollup import mark_devices, mark_usage
from billing.staging import ATTEMPT, INTERVAL, REQUEST, stage_attempts, stage_intervals, stage_requests

_OLDEST: Final = datetime(2025, 1, 1, tzinfo=UTC)
_CLOCK_SKEW: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What was new, and what of it has no price or no rate yet."""

    requests: int
    attempts: int
    intervals: int
    unpriced: Counter[str]  # requests by the model that has no price
    uncosted: Counter[str]  # requests by the kind of device that has no rate


def record(
    connection: Connection,
    *,
    settlements: Sequence[Settlement] = (),
    attempts: Sequence[Attempt] = (),
    intervals: Sequence[Interval] = (),
) -> Recorded:
    """Book the records. Raises ValueError for a request id that is none of ours, besides what Postgres refuses."""
    take_turn(connection, Turn.RECORDING)
    make(connection, {_month(request_id) for request_id in _request_ids(settlements, attempts)})
    settled = _insert_requests(connection, settlements)
    reported = _insert_attempts(connection, attempts)
    timed = _insert_intervals(connection, intervals)
    _notice_devices(connection, attempts, intervals)
    closed = close(connection, settled | {request_id for request_id, _ in reported})
    orphans = {request_id for request_id, _ in reported} - closed.ids
    _await_settlements(connection, [a for a in attempts if a.request_id in orphans], settled)
    _await_reports(connection, [s for s in settlements if s.request_id in settled], reported)
    return Recorded(
        requests=len(settled),
        attempts=len(reported),
        intervals=timed,
        unpriced=Counter(model for request_id, model in closed.unpriced.items() if request_id in settled),
        uncosted=Counter(closed.uncosted.values()),
    )


def _request_ids(settlements: Sequence[Settlement], attempts: Sequence[Attempt]) -> set[UUID]:
    return {s.request_id for s in settlements} | {a.request_id for a in attempts}


def _month(request_id: UUID) -> datetime:
    made = uuid7_time(request_id)
    if not _OLDEST <= made <= datetime.now(UTC) + _CLOCK_SKEW:
        raise ValueError(f"request id from {made:%Y-%m-%d}: no such time in these books")
    return month_of(made)


def _insert_requests(connection: Connection, settlements: Sequence[Settlement]) -> set[UUID]:
    """Ids of the new rows."""
    if not settlements:
        return set()
    stage_requests(connection, _first_of_each(settlements))
    spoken = [s.request_id for s in settlements if not s.swept]
    replaced = connection.scalars(
        text("DELETE FROM requests WHERE id = ANY(:ids) AND swept RETURNING finished_at"), {"ids": spoken}
    )
    mark_usage(connection, set(replaced))
    return set(
        connection.scalars(
            text(
                f"INSERT INTO requests ({REQUEST}) SELECT {REQUEST} FROM staged_requests ORDER BY id "
                "ON CONFLICT (id) DO NOTHING RETURNING id"
            )
        )
    )


def _first_of_each(settlements: Iterable[Settlement]) -> Iterable[Settlement]:
    first: dict[UUID, Settlement] = {}
    for settlement in settlements:
        first.setdefault(settlement.request_id, settlement)
    return first.values()


def _insert_attempts(connection: Connection, attempts: Sequence[Attempt]) -> set[tuple[UUID, int]]:
    """(request id, attempt) of the new rows."""
    if not attempts:
        return set()
    stage_attempts(connection, attempts)
    connection.execute(
        text(
            "DELETE FROM attempts WHERE request_id = ANY(:ids) AND outcome = :lost AND (request_id, attempt) IN "
            "(SELECT request_id, attempt FROM staged_attempts WHERE outcome <> :lost)"
        ),
        {"ids": [a.request_id for a in attempts], "lost": LOST},
    )
    new = connection.execute(
        text(
            f"INSERT INTO attempts ({ATTEMPT}) SELECT {ATTEMPT} FROM staged_attempts "
            "ORDER BY request_id, attempt ON CONFLICT (request_id, attempt) DO NOTHING RETURNING request_id, attempt"
        )
    )
    return {(row.request_id, row.attempt) for row in new}


def _insert_intervals(connection: Connection, intervals: Sequence[Interval]) -> int:
    """How many were new."""
    if not intervals:
        return 0
    stage_intervals(connection, intervals)
    new = connection.execute(
        text(
            f"INSERT INTO device_intervals ({INTERVAL}) SELECT {INTERVAL} FROM staged_device_intervals "
            "ORDER BY worker, device, number ON CONFLICT DO NOTHING RETURNING started_at, ended_at"
        )
    ).all()
    mark_devices(connection, [(row.started_at, row.ended_at) for row in new])
    return len(new)


def _notice_devices(connection: Connection, attempts: Iterable[Attempt], intervals: Iterable[Interval]) -> None:
    """A device is owned from its first record on."""
    seen: dict[str, tuple[str, datetime]] = {}
    heard = [(i.device, i.device_kind, i.started_at) for i in intervals]
    heard += [(a.device, a.device_kind, a.received_at or a.finished_at) for a in attempts]
    for device, kind, at in heard:
        known = seen.get(device)
        seen[device] = (kind, min(at, known[1]) if known else at)
    if seen:
        connection.execute(
            text(
                "INSERT INTO devices (name, kind, owned_from) VALUES (:name, :kind, :at) "
                "ON CONFLICT (name) DO UPDATE SET kind = excluded.kind, "
                "owned_from = least(devices.owned_from, excluded.owned_from) "
                "WHERE devices.kind <> excluded.kind OR devices.owned_from > excluded.owned_from"
            ),
            [{"name": name, "kind": kind, "at": at} for name, (kind, at) in sorted(seen.items())],
        )


def _await_settlements(connection: Connection, orphans: Iterable[Attempt], settled: set[UUID]) -> None:
    """Reports whose request has no row yet, with all that the sweeper needs to settle it."""
    waiting = [
        {"id": a.request_id, "deadline": a.origin.deadline, "origin": json.dumps(asdict(a.origin), default=str)}
        for a in orphans
        if a.origin
    ]
    if settled:
        connection.execute(text("DELETE FROM awaiting_settlement WHERE request_id = ANY(:ids)"), {"ids": list(settled)})
    if waiting:
        connection.execute(
            text(
                "INSERT INTO awaiting_settlement (request_id, deadline, origin) VALUES (:id, :deadline, :origin) "
                "ON CONFLICT DO NOTHING"
            ),
            waiting,
        )


def _await_reports(connection: Connection, new: Iterable[Settlement], reported: set[tuple[UUID, int]]) -> None:
    """Attempts that an owner saw and no worker has reported yet."""
    if reported:
        connection.execute(
            text(
                "DELETE FROM awaiting_report w USING unnest(CAST(:ids AS uuid[]), CAST(:attempts AS int[])) "
                "AS r(request_id, attempt) WHERE (w.request_id, w.attempt) = (r.request_id, r.attempt)"
            ),
            {"ids": [pair[0] for pair in reported], "attempts": [pair[1] for pair in reported]},
        )
    seen = [_seen_row(s.request_id, attempt) for s in new for attempt in s.attempts]
    seen = [row for row in seen if (row["id"], row["attempt"]) not in reported]
    if seen:
        connection.execute(
            text(
                "INSERT INTO awaiting_report (request_id, attempt, worker, device, device_kind, device_ns) "
                "SELECT :id, :attempt, :worker, :device, :kind, :ns "
                "WHERE NOT EXISTS (SELECT FROM attempts WHERE request_id = :id AND attempt = :attempt) "
                "ON CONFLICT DO NOTHING"
            ),
            seen,
        )


def _seen_row(request_id: UUID, seen: AttemptSeen) -> dict[str, object]:
    return {
        "id": request_id,
        "attempt": seen.attempt,
        "worker": seen.worker,
        "device": seen.device,
        "kind": seen.device_kind,
        "ns": seen.device_ns,
    }
