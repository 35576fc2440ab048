"""Reports on the books, and whether they close."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from typing import Final

import click

from billing import audit as auditing
from billing import economics, tenants
from service.cli.terminal import Moment, books, plain, rounded, say_next, table
from service.settings import Settings

_SWEEP_S: Final = 60  # ample time for the sweeper's next round


@click.command()
@click.option("--tenant", "tenant_name", help="Only this tenant. Default: all.")
@click.option("--from", "start", type=Moment(), help="First day or moment, UTC. Default: a month before the end.")
@click.option("--to", "end", type=Moment(), help="The day or moment after the last. Default: tomorrow.")
@click.option("--format", "form", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True)
def report(*, tenant_name: str | None, start: datetime | None, end: datetime | None, form: str) -> None:
    """Requests, tokens, revenue, cost and margin of a time range, by tenant and model."""
    end = end or datetime.combine(datetime.now(UTC), time(), UTC) + timedelta(days=1)
    start = start or end - timedelta(days=30)
    if end <= start:
        raise click.UsageError("--to must be after --from.")
    with books() as connection:
        of = tenants.tenant_id_of(connection, tenant_name) if tenant_name else None
        found = economics.report(connection, start, end)
    lines = [line for line in found.lines if of is None or line.tenant_id == of]
    rows = [_line(line) for line in lines]
    if form == "json":
        span = {"from": found.start.isoformat(), "to": found.end.isoformat(), "currency": found.currency}
        content = span | {"lines": [dict(zip(_REPORT, row, strict=True)) for row in rows]}
        print(json.dumps(content, indent=2, default=plain))
        return
    if form == "csv":
        csv.writer(sys.stdout).writerows([_REPORT, *([_exact(cell) for cell in row] for row in rows)])
        return
    print(f"{found.start:%Y-%m-%d %H:%M} to {found.end:%Y-%m-%d %H:%M} UTC, {found.currency}\n")
    if not rows:
        print("No requests in this range.")
        say_next("pennyweight report")
        return
    total = ("total", "", *(sum(column) for column in list(zip(*rows, strict=True))[2:]))
    head = [name.upper().replace("_", " ") for name in _REPORT]
    table(head, [[_short(cell) for cell in row] for row in (*rows, total)])
    for note in _notes(found, lines):
        print(note)
    say_next("pennyweight audit")


_REPORT: Final = (
    "tenant",
    "model",
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "device_seconds",
    "revenue",
    "cost",
    "loaded_cost",
    "margin",
    "loaded_margin",
)


_Cell = str | int | Decimal


def _line(line: economics.Line) -> tuple[_Cell, ...]:
    amounts = (line.device_seconds, line.revenue, line.cost, line.loaded_cost, line.margin, line.loaded_margin)
    counts = (line.requests, line.prompt_tokens, line.cached_tokens, line.completion_tokens)
    return (line.tenant or "", line.model or "", *counts, *amounts)


def _exact(cell: _Cell) -> str:
    return plain(cell) if isinstance(cell, Decimal) else str(cell)


def _short(cell: _Cell) -> str:
    return rounded(cell) if isinstance(cell, Decimal) else str(cell)


def _notes(found: economics.Report, lines: Sequence[economics.Line]) -> Iterator[str]:
    yield (
        "\nCost is the measured device time of the requests; loaded cost also carries idle, loading, overhead and "
        "waste of all devices together, shared out in proportion to cost."
    )
    if found.dirty:
        yield "The newest requests are not in these sums yet: look again in some seconds."
    if unpriced := sum(line.unpriced for line in lines):
        yield f"{unpriced} requests have no price: `pennyweight price set MODEL …` prices them."
    if uncosted := sum(line.uncosted for line in lines):
        yield f"{uncosted} requests have no cost: `pennyweight device-rate set KIND --hourly …` costs them."
    if found.example_prices or found.example_rates:
        yield "These sums rest on EXAMPLES: " + ", ".join([*found.example_prices, *found.example_rates]) + "."


@click.command()
@click.option("--from", "start", type=Moment(), help="Default: a day before the end.")
@click.option("--to", "end", type=Moment(), help="Default: now.")
def audit(*, start: datetime | None, end: datetime | None) -> None:
    """Compare what was written independently. Ends with status 1 if something doesn't close."""
    now, settings = datetime.now(UTC), Settings.from_environment()
    start, end = start or (end or now) - timedelta(days=1), end or now
    if end <= start:
        raise click.UsageError("--to must be after --from.")
    too_old = now - timedelta(seconds=settings.request_timeout_s + settings.settle_grace_s + _SWEEP_S)
    with books() as connection:
        found = auditing.audit(connection, start, end, too_old=too_old)
    table(
        ("", "IDENTITY", "OF", "RESIDUAL", "COMPARED"),
        [("ok" if f.closes else "OPEN", f.identity, f.subject, f.residual, f.compared) for f in found],
    )
    breaches = sum(not finding.closes for finding in found)
    print(f"{len(found)} comparisons, {breaches} don't close. Not compared yet: 3, the ledger; 5, days of a report.")
    say_next("pennyweight report --from " + f"{now:%Y-%m-%d} --to {now + timedelta(days=1):%Y-%m-%d}")
    if breaches:
        raise SystemExit(1)
