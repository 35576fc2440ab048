"""Do the books close? Each identity compares two sources that were written independently, and prints what is left.

1. Time: per worker boot and device, the spans of its intervals against its wall clock; and the busy time of the
   intervals against what its attempts used, on every cut.
2. Tokens: rows by kind, as the executor counted them in intervals, against the plan's count in attempts.
4. Admissions: each owner's boot numbered its requests 1, 2, 3 …, and each number is one row.

A boot that was killed has told less than it did, and one that runs has attempts open. So time is compared up to a
boot's last interval, tokens up to its last one at whose end no attempt was open, and admissions up to the youngest that
is too old to run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Final

from sqlalchemy import Connection, Row, text

UNACCOUNTED_AT_MOST: Final = Decimal("0.001")  # of the wall clock
_KINDS: Final = ("prompt", "recomputed", "generated", "drafted")

# Σ over intervals of a boot, beside Σ over its attempts that closed in one of them.
_BOOTS: Final = text("""
WITH spans AS (
    SELECT worker, device, count(*) AS intervals, max(number) AS newest,
           max(end_ns) - min(start_ns) AS wall_ns, sum(end_ns - start_ns) AS covered_ns,
           sum(busy_ns) AS busy_ns, sum(idle_ns) AS idle_ns, sum(loading_ns) AS loading_ns,
           sum(waste_ns) AS waste_ns, sum(overhead_ns) AS overhead_ns,
           (array_agg(open_ns ORDER BY number DESC))[1] AS open_ns, max(number) FILTER (WHERE open_ns = 0) AS quiet
    FROM device_intervals
    WHERE worker IN (SELECT worker FROM device_intervals WHERE ended_at > :start AND started_at < :end)
    GROUP BY worker, device
)
SELECT s.*, a.used_ns, t.*
FROM spans s CROSS JOIN LATERAL (
    SELECT coalesce(sum(used_ns), 0) AS used_ns
    FROM attempts WHERE worker = s.worker AND device = s.device AND "interval" <= s.newest
) a
CROSS JOIN LATERAL (
    SELECT coalesce(sum(prompt_tokens), 0) AS prompt_planned, coalesce(sum(recomputed_tokens), 0) AS recomputed_planned,
           coalesce(sum(generated_tokens), 0) AS generated_planned, coalesce(sum(drafted_tokens), 0) AS drafted_planned
    FROM attempts WHERE worker = s.worker AND device = s.device AND "interval" <= s.quiet
) p
CROSS JOIN LATERAL (
    SELECT coalesce(sum(prompt_tokens), 0) - prompt_planned AS prompt,
           coalesce(sum(recomputed_tokens), 0) - recomputed_planned AS recomputed,
           coalesce(sum(generated_tokens), 0) - generated_planned AS generated,
           coalesce(sum(drafted_tokens), 0) - drafted_planned AS drafted
    FROM device_intervals WHERE worker = s.worker AND device = s.device AND number <= s.quiet
) t
ORDER BY s.worker, s.device
""")

# A row that was swept has no number, and stands for one that is missing. What ended before ``too_old`` was numbered
# before it, and so was every lower number: none of those can still run, however long each waited for its own.
_NUMBERS: Final = text("""
WITH boots AS (SELECT DISTINCT boot_id FROM requests WHERE finished_at >= :start AND finished_at < :end),
     due AS (SELECT boot_id, max(boot_seq) AS due FROM requests WHERE finished_at < :too_old GROUP BY boot_id)
SELECT boot_id, due, max(boot_seq) AS highest, count(boot_seq) AS numbered,
       count(boot_seq) - count(DISTINCT boot_seq) AS repeated, count(*) FILTER (WHERE boot_seq IS NULL) AS swept,
       due - count(DISTINCT boot_seq) FILTER (WHERE boot_seq <= due) AS absent
FROM requests JOIN boots USING (boot_id) LEFT JOIN due USING (boot_id)
GROUP BY boot_id, due ORDER BY boot_id
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One identity for one subject: what is left when the two sources are subtracted, and whether that is too much."""

    identity: str
    subject: str
    compared: str
    residual: str
    closes: bool


def audit(connection: Connection, start: datetime, end: datetime, *, too_old: datetime) -> list[Finding]:
    """Every identity for each boot that was alive in [start, end), over the boot's whole life.

    No request from before ``too_old`` can still run.
    """
    span = {"start": start, "end": end, "too_old": too_old}
    boots = connection.execute(_BOOTS, span).all()
    numbers = connection.execute(_NUMBERS, span).all()
    return [finding for boot in boots for finding in _of_worker(boot)] + [_of_owner(boot) for boot in numbers]


def _of_worker(boot: Row[tuple[object, ...]]) -> Iterable[Finding]:
    spans_ns = boot.busy_ns + boot.idle_ns + boot.loading_ns + boot.waste_ns + boot.overhead_ns
    unaccounted_ns = boot.wall_ns - spans_ns
    whole = boot.intervals == boot.newest and boot.covered_ns == boot.wall_ns
    share = Decimal(int(unaccounted_ns)) / int(boot.wall_ns) if boot.wall_ns else Decimal(0)
    subject = f"{boot.worker} {boot.device}"
    yield Finding(
        identity="1 wall clock",
        subject=subject,
        compared=f"{boot.intervals} intervals of {_seconds(boot.wall_ns)} s: "
        f"busy {_seconds(boot.busy_ns)}, idle {_seconds(boot.idle_ns)}, loading {_seconds(boot.loading_ns)}, "
        f"waste {_seconds(boot.waste_ns)}, overhead {_seconds(boot.overhead_ns)}",
        residual=f"unaccounted {int(unaccounted_ns)} ns = {share:.5%}" + ("" if whole else "; intervals are missing"),
        closes=whole and abs(share) <= UNACCOUNTED_AT_MOST,
    )
    left_ns = int(boot.busy_ns - boot.used_ns - boot.open_ns)
    yield Finding(
        identity="1 busy time",
        subject=subject,
        compared=f"busy of intervals against used of attempts + open {int(boot.open_ns)} ns",
        residual=f"{left_ns} ns",
        closes=left_ns == 0,
    )
    yield _tokens(boot, subject)


def _tokens(boot: Row[tuple[object, ...]], subject: str) -> Finding:
    left = {kind: int(getattr(boot, kind)) for kind in _KINDS}
    upto = f"up to interval {boot.quiet}" if boot.quiet else "not compared: attempts were open all the time"
    return Finding(
        identity="2 tokens",
        subject=subject,
        compared=f"rows that the executor counted against those of the plan, {upto}",
        residual=", ".join(f"{kind} {number}" for kind, number in left.items()),
        closes=not any(left.values()),
    )


def _of_owner(boot: Row[tuple[object, ...]]) -> Finding:
    missing = max(0, (boot.absent or 0) - boot.swept)
    young = max(0, (boot.highest or 0) - (boot.numbered - boot.repeated) - boot.swept - missing)
    return Finding(
        identity="4 admissions",
        subject=boot.boot_id,
        compared=f"numbers 1 to {boot.highest or 0} against {boot.numbered} numbered rows and {boot.swept} swept ones",
        residual=f"{missing} missing, {boot.repeated} repeated" + (f", {young} may still run" if young else ""),
        closes=not missing and not boot.repeated,
    )


def _seconds(nanoseconds: Decimal | int) -> str:
    return f"{Decimal(int(nanoseconds)) / 10**9:.3f}"
