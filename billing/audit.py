"""Do the books close? Each identity compares two sources that were written independently, and prints what is left.

1. Time: per worker boot and device, the spans of its intervals against its wall clock; and the busy time of the
   intervals against what its attempts used, on every cut.
2. Tokens: rows by kind, as the executor counted them in intervals, against the plan's count in attempts.
4. Admissions: each owner's boot numbered its requests 1, 2, 3 …, and each number is one row.

A boot that was killed has told less than it did: its attempts since the last interval are lost, or reported without
the interval they closed in. So a boot is compared up to its last interval, and said to be cut short.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Final

from sqlalchemy import Connection, Row, text

UNACCOUNTED_AT_MOST: Final = Decimal("0.001")  # of the wall clock

# Σ over intervals of a boot, beside Σ over its attempts that closed in one of them.
_BOOTS: Final = text("""
WITH spans AS (
    SELECT worker, device, count(*) AS intervals, max(number) AS newest, bool_or(last) AS ended,
           max(end_ns) - min(start_ns) AS wall_ns, sum(end_ns - start_ns) AS covered_ns,
           sum(busy_ns) AS busy_ns, sum(idle_ns) AS idle_ns, sum(loading_ns) AS loading_ns,
           sum(waste_ns) AS waste_ns, sum(overhead_ns) AS overhead_ns,
           (array_agg(open_ns ORDER BY number DESC))[1] AS open_ns,
           sum(prompt_tokens) AS prompt_tokens, sum(recomputed_tokens) AS recomputed_tokens,
           sum(generated_tokens) AS generated_tokens, sum(steps) AS steps
    FROM device_intervals
    WHERE worker IN (SELECT worker FROM device_intervals WHERE ended_at > :start AND started_at < :end)
    GROUP BY worker, device
)
SELECT s.*, a.*
FROM spans s CROSS JOIN LATERAL (
    SELECT coalesce(sum(used_ns), 0) AS used_ns, coalesce(sum(wasted_ns), 0) AS wasted_ns,
           coalesce(sum(prompt_tokens), 0) AS attempt_prompt_tokens,
           coalesce(sum(recomputed_tokens), 0) AS attempt_recomputed_tokens,
           coalesce(sum(generated_tokens), 0) AS attempt_generated_tokens
    FROM attempts WHERE worker = s.worker AND device = s.device AND "interval" <= s.newest
) a
ORDER BY s.worker
""")

_NUMBERS: Final = text("""
SELECT boot_id, count(boot_seq) AS numbered, count(DISTINCT boot_seq) AS different,
       coalesce(max(boot_seq), 0) AS highest, count(*) FILTER (WHERE boot_seq IS NULL) AS swept
FROM requests
WHERE boot_id IN (SELECT boot_id FROM requests WHERE finished_at >= :start AND finished_at < :end)
GROUP BY boot_id ORDER BY boot_id
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One identity for one subject: what is left when the two sources are subtracted, and whether that is too much."""

    identity: str
    subject: str
    compared: str
    residual: str
    closes: bool


def audit(connection: Connection, start: datetime, end: datetime) -> list[Finding]:
    """Every identity for each boot that was alive in [start, end), over the boot's whole life."""
    span = {"start": start, "end": end}
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
    # Attempts that closed after the last interval are not in it; of a boot that runs or was killed it may hold more.
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
    """Attempts still open at the last interval have rows in it that no report has told yet, so only a boot at rest
    can be compared.
    """
    compared = "executor's rows against the plan's: prompt, recomputed, generated"
    if boot.open_ns:
        return Finding(
            identity="2 tokens", subject=subject, compared=compared, residual="attempts are open", closes=True
        )
    left = [
        int(getattr(boot, f"{kind}_tokens") - getattr(boot, f"attempt_{kind}_tokens"))
        for kind in ("prompt", "recomputed", "generated")
    ]
    residual = ", ".join(str(number) for number in left)
    return Finding(identity="2 tokens", subject=subject, compared=compared, residual=residual, closes=not any(left))


def _of_owner(boot: Row[tuple[object, ...]]) -> Finding:
    """A row that was swept has no number: it fills one gap."""
    gaps = boot.highest - boot.different
    repeats = boot.numbered - boot.different
    return Finding(
        identity="4 admissions",
        subject=boot.boot_id,
        compared=f"numbers 1 to {boot.highest} against {boot.numbered} rows, {boot.swept} swept",
        residual=f"{gaps} missing, {repeats} repeated",
        closes=not repeats and gaps <= boot.swept,
    )


def _seconds(nanoseconds: Decimal | int) -> str:
    return f"{Decimal(int(nanoseconds)) / 10**9:.3f}"
