"""Deferred requests: a batch is a list of lines, each of which is run to its end exactly once.

A line is ``pending``, then ``running`` under a claim that its runner renews, then ``done``, ``failed`` or ``cancelled``
for good. A claim that is not renewed lapses, and the line is anybody's again. Only who holds the claim may finish a
line, so of two runners that both believe they have it one is told that it came too late.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, text

from billing.contents import Seal, keep
from billing.ids import uuid7

LASTS: Final = timedelta(days=30)  # texts of a batch, from its start
_PAGE: Final = 500


class LineState(StrEnum):
    """How a line ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    id: UUID
    tenant_id: UUID
    api_key_id: UUID
    weight: float  # of the tenant
    model: str
    endpoint: str
    total_lines: int
    open_lines: int
    failed_lines: int
    cancelled_lines: int
    created_at: datetime
    expires_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedLine:
    line: int
    custom_id: str
    body: bytes | None = field(repr=False)  # None: it has expired


_FIND: Final = text("""
SELECT b.*, t.weight, failed.n AS failed_lines, cancelled.n AS cancelled_lines
FROM batches b JOIN tenants t ON t.id = b.tenant_id
CROSS JOIN LATERAL (SELECT count(*) AS n FROM batch_lines l WHERE l.batch_id = b.id AND l.state = 'failed') failed
CROSS JOIN LATERAL (SELECT count(*) AS n FROM batch_lines l WHERE l.batch_id = b.id AND l.state = 'cancelled') cancelled
WHERE b.id = :id
""")

_CLAIM: Final = text("""
WITH chosen AS (
    SELECT batch_id, line FROM batch_lines
    WHERE batch_id = :batch_id AND (state = 'pending' OR (state = 'running' AND claimed_until < clock_timestamp()))
    ORDER BY line LIMIT :limit FOR UPDATE SKIP LOCKED),
     claimed AS (
    UPDATE batch_lines l
    SET state = 'running', claimed_by = :by, claimed_until = clock_timestamp() + :lease
    FROM chosen c WHERE l.batch_id = c.batch_id AND l.line = c.line
    RETURNING l.line, l.custom_id, l.input_content)
SELECT claimed.*, contents.tenant_id, contents.sealed
FROM claimed LEFT JOIN contents ON contents.id = claimed.input_content ORDER BY line
""")

_FINISH: Final = text("""
UPDATE batch_lines
SET state = :state, request_id = :request_id, error_code = :error_code, finished_at = now()
WHERE batch_id = :batch_id AND line = :line AND state = 'running' AND claimed_by = :by
""")

_CLOSE: Final = text("""
UPDATE batches
SET open_lines = open_lines - :count, finished_at = CASE WHEN open_lines = :count THEN now() END
WHERE id = :batch_id
""")


def start_batch(
    connection: Connection,
    seal: Seal,
    lines: Sequence[tuple[str, bytes]],
    *,
    tenant_id: UUID,
    api_key_id: UUID,
    model: str,
    endpoint: str,
) -> UUID:
    """Write down a batch of (custom_id, body) lines, at least one. Returns its id."""
    batch_id, expires_at = uuid7(), datetime.now(UTC) + LASTS
    connection.execute(
        text(
            "INSERT INTO batches (id, tenant_id, api_key_id, model, endpoint, total_lines, open_lines, expires_at) "
            "VALUES (:id, :tenant_id, :api_key_id, :model, :endpoint, :lines, :lines, :expires_at)"
        ),
        {
            "id": batch_id,
            "tenant_id": tenant_id,
            "api_key_id": api_key_id,
            "model": model,
            "endpoint": endpoint,
            "lines": len(lines),
            "expires_at": expires_at,
        },
    )
    bodies = keep(connection, seal, (body for _, body in lines), tenant_id=tenant_id, expires_at=expires_at)
    connection.execute(
        text(
            "INSERT INTO batch_lines (batch_id, line, custom_id, state, input_content) "
            "VALUES (:batch_id, :line, :custom_id, 'pending', :content)"
        ),
        [
            {"batch_id": batch_id, "line": at, "custom_id": custom_id, "content": content}
            for at, ((custom_id, _), content) in enumerate(zip(lines, bodies, strict=True), start=1)
        ],
    )
    return batch_id


def find_batch(connection: Connection, batch_id: UUID) -> Batch | None:
    row = connection.execute(_FIND, {"id": batch_id}).one_or_none()
    if row is None:
        return None
    return Batch(**{name: getattr(row, name) for name in Batch.__dataclass_fields__})


def waiting_batches(connection: Connection, *, limit: int) -> list[UUID]:
    """Batches with lines that nobody runs, oldest first."""
    found = connection.scalars(
        text(
            "SELECT DISTINCT batch_id FROM batch_lines "
            "WHERE state = 'pending' OR (state = 'running' AND claimed_until < clock_timestamp()) "
            "ORDER BY batch_id LIMIT :limit"
        ),
        {"limit": limit},
    )
    return list(found)


def claim_lines(
    connection: Connection, seal: Seal, batch_id: UUID, *, by: str, lease: timedelta, limit: int
) -> list[ClaimedLine]:
    """Take up to ``limit`` lines that nobody runs. Raises SealError."""
    rows = connection.execute(_CLAIM, {"batch_id": batch_id, "by": by, "lease": lease, "limit": limit})
    return [
        ClaimedLine(
            line=row.line,
            custom_id=row.custom_id,
            body=None if row.sealed is None else seal.open(row.input_content, row.tenant_id, row.sealed),
        )
        for row in rows
    ]


def renew_claims(connection: Connection, *, by: str, lease: timedelta) -> None:
    """Keep every line that this runner runs."""
    connection.execute(
        text(
            "UPDATE batch_lines SET claimed_until = clock_timestamp() + :lease "
            "WHERE state = 'running' AND claimed_by = :by"
        ),
        {"by": by, "lease": lease},
    )


def give_back(connection: Connection, batch_id: UUID, line: int, *, by: str) -> None:
    """The line did not come to an end: it is anybody's again."""
    connection.execute(
        text(
            "UPDATE batch_lines SET state = 'pending', claimed_by = NULL, claimed_until = NULL "
            "WHERE batch_id = :batch_id AND line = :line AND state = 'running' AND claimed_by = :by"
        ),
        {"batch_id": batch_id, "line": line, "by": by},
    )


def finish_line(
    connection: Connection,
    seal: Seal,
    batch: Batch,
    line: int,
    *,
    by: str,
    state: LineState,
    output: bytes,
    request_id: UUID | None = None,
    error_code: str | None = None,
) -> bool:
    """Keep the output of a line, for good. False when the claim is lost: then nothing was written."""
    place = {"batch_id": batch.id, "line": line, "by": by}
    ended = {"state": state, "request_id": request_id, "error_code": error_code}
    if connection.execute(_FINISH, {**place, **ended}).rowcount == 0:
        return False
    (content,) = keep(connection, seal, [output], tenant_id=batch.tenant_id, expires_at=batch.expires_at)
    connection.execute(
        text("UPDATE batch_lines SET output_content = :content WHERE batch_id = :batch_id AND line = :line"),
        {**place, "content": content},
    )
    connection.execute(_CLOSE, {"batch_id": batch.id, "count": 1})
    return True


def cancel_batch(connection: Connection, batch_id: UUID) -> int:
    """Lines that nobody runs yet will not be run; running ones come to their end. Returns how many."""
    count = connection.execute(
        text(
            "UPDATE batch_lines SET state = 'cancelled', finished_at = now() WHERE batch_id = :batch_id "
            "AND (state = 'pending' OR (state = 'running' AND claimed_until < clock_timestamp()))"
        ),
        {"batch_id": batch_id},
    ).rowcount
    connection.execute(text("UPDATE batches SET cancelled_at = now() WHERE id = :batch_id"), {"batch_id": batch_id})
    if count:
        connection.execute(_CLOSE, {"batch_id": batch_id, "count": count})
    return count


def outputs(connection: Connection, seal: Seal, batch_id: UUID) -> Iterator[bytes]:
    """What the ended lines gave, in the order of the input; without cancelled and expired ones. Raises SealError."""
    after = 0
    while True:
        page = connection.execute(
            text(
                "SELECT l.line, c.id, c.tenant_id, c.sealed "
                "FROM batch_lines l JOIN contents c ON c.id = l.output_content "
                "WHERE l.batch_id = :batch_id AND l.line > :after ORDER BY l.line LIMIT :limit"
            ),
            {"batch_id": batch_id, "after": after, "limit": _PAGE},
        ).all()
        for row in page:
            yield seal.open(row.id, row.tenant_id, row.sealed)
        if len(page) < _PAGE:
            return
        after = page[-1].line
