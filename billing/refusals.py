"""Refused requests are no rows of ``requests``: they are counted by tenant, key, cause and quarter of an hour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, text

from billing.rollup import quarter_of


class Refusal(NamedTuple):
    """Where a refusal is counted. Tenant and key are None for a caller who is not known."""

    bucket: datetime  # any moment: the books cut it to its quarter
    tenant_id: UUID | None
    api_key_id: UUID | None
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    cause: str
    refusals: int


_ADD: Final = text("""
INSERT INTO refusals_15m (bucket, tenant_id, api_key_id, cause, refusals)
VALUES (:bucket, :tenant_id, :api_key_id, :cause, :refusals)
ON CONFLICT (bucket, tenant_id, api_key_id, cause) DO UPDATE SET refusals = refusals_15m.refusals + excluded.refusals
""")


def add(connection: Connection, counts: Mapping[Refusal, int]) -> None:
    """Add to what is counted already, in one order for all, so that two processes never wait for each other."""
    rows = [
        {"bucket": quarter_of(bucket), "tenant_id": tenant, "api_key_id": key, "cause": cause, "refusals": count}
        for (bucket, tenant, key, cause), count in sorted(counts.items(), key=str)
    ]
    if rows:
        connection.execute(_ADD, rows)


def by_cause(connection: Connection, start: datetime, end: datetime, *, tenant_id: UUID | None = None) -> list[Cause]:
    """Refusals in the quarters that start in [start, end): of one tenant, or of everybody, known or not."""
    rows = connection.execute(
        text(
            "SELECT cause, CAST(sum(refusals) AS bigint) AS refusals FROM refusals_15m "
            "WHERE bucket >= :start AND bucket < :end AND (CAST(:tenant AS uuid) IS NULL OR tenant_id = :tenant) "
            "GROUP BY cause ORDER BY 2 DESC, 1"
        ),
        {"start": quarter_of(start), "end": end, "tenant": tenant_id},
    )
    return [Cause(cause=row.cause, refusals=row.refusals) for row in rows]
