"""The tables of *Unit economics*: the same columns by tenant and by model, each with a CSV of exact numbers."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Final

import streamlit as st

from billing.economics import Line, Report
from billing.histograms import BOUNDS, ERROR
from billing.trends import Latencies, Quantiles
from dashboard import downloads, figures, table
from dashboard.economics_cards import outcomes
from dashboard.table import Cell, Column, Row, Tone

_COLUMNS: Final = (
    Column(label="Requests", numeric=True),
    Column(label="Tokens in", numeric=True),
    Column(label="Cached", numeric=True, hint="Share of the tokens in that came from the prefix cache"),
    Column(label="Tokens out", numeric=True, hint="Billed"),
    Column(label="Revenue", numeric=True),
    Column(label="Cost", numeric=True, hint="Usage basis: the device time that served the requests"),
    Column(
        label="Loaded cost",
        numeric=True,
        hint="Fully loaded: a share of all devices' time, idle, loading, overhead and waste too, by usage cost",
    ),
    Column(label="Margin", numeric=True, hint="Usage basis, as a share of revenue"),
    Column(label="Loaded margin", numeric=True, hint="Fully loaded, as a share of revenue"),
    Column(label="Cost / 1M", numeric=True, hint="Usage basis, per million tokens in and out"),
)


def by_tenant(report: Report) -> None:
    _show("By tenant", report.tenants, [line.tenant or "" for line in report.tenants], report.currency)


def by_model(report: Report) -> None:
    _show("By model", report.models, [line.model or "" for line in report.models], report.currency)


def _show(title: str, lines: Sequence[Line], names: Sequence[str], currency: str) -> None:
    if not lines:
        return
    kind = title.removeprefix("By ")
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="bottom"):
        st.subheader(title, anchor=False, width="content")
        downloads.button([_exact(kind, name, line) for name, line in zip(names, lines, strict=True)], name=f"by-{kind}")
    rows = [_row(name, line, currency) for name, line in zip(names, lines, strict=True)]
    table.show([Column(label=kind.capitalize()), *_COLUMNS], rows, label=title, key=f"by-{kind}")


def _row(name: str, line: Line, currency: str) -> Row:
    return Row(
        cells=[
            Cell(name),
            Cell(figures.count(line.requests), outcomes(line)),
            Cell(figures.short_count(line.prompt_tokens), figures.count(line.prompt_tokens)),
            Cell(figures.share(line.cached_tokens, line.prompt_tokens), figures.count(line.cached_tokens)),
            Cell(figures.short_count(line.completion_tokens), figures.count(line.completion_tokens)),
            table.money_cell(line.revenue, currency),
            table.money_cell(line.cost, currency),
            table.money_cell(line.loaded_cost, currency),
            _margin_cell(line.margin, line.revenue, currency),
            _margin_cell(line.loaded_margin, line.revenue, currency),
            table.money_cell(line.per_million_tokens(line.cost), currency),
        ]
    )


def _margin_cell(margin: Decimal, revenue: Decimal, currency: str) -> Cell:
    tone = Tone.BAD if margin < 0 else Tone.PLAIN
    return Cell(figures.share(margin, revenue), figures.exact_money(margin, currency), tone)


def _exact(kind: str, name: str, line: Line) -> dict[str, object]:
    return {
        kind: name,
        "requests": line.requests,
        "cancelled": line.cancelled,
        "failed": line.failed,
        "prompt_tokens": line.prompt_tokens,
        "cached_tokens": line.cached_tokens,
        "completion_tokens": line.completion_tokens,
        "revenue": format(line.revenue, "f"),
        "cost": format(line.cost, "f"),
        "loaded_cost": format(line.loaded_cost, "f"),
        "margin": format(line.margin, "f"),
        "loaded_margin": format(line.loaded_margin, "f"),
        "device_seconds": format(line.device_seconds, "f"),
        "waste_seconds": format(line.waste_seconds, "f"),
        "unpriced": line.unpriced,
        "uncosted": line.uncosted,
        "pending": line.pending,
    }


def latency(latencies: Latencies) -> None:
    columns = [
        Column(label="Stage"),
        Column(label="Requests", numeric=True, hint="That have this time"),
        *(Column(label=name, numeric=True) for name in ("p50", "p95", "p99")),
    ]
    stages: tuple[tuple[str, str, Quantiles], ...] = (
        ("Queue", "From enqueued until first scheduled", latencies.queue),
        ("Time to first token, streamed", "From request read until the first content was sent", latencies.ttft),
        ("Time per output token, streamed", "Between tokens, averaged over a request", latencies.tpot),
        ("Total", "From request read until its end", latencies.total),
    )
    rows = [
        Row(
            cells=[
                Cell(name, hint),
                Cell(figures.count(q.counted)),
                *(_quantile_cell(value, exact=latencies.exact) for value in (q.p50, q.p95, q.p99)),
            ]
        )
        for name, hint, q in stages
    ]
    table.show(columns, rows, label="Latency", key="latency")


def latency_note(latencies: Latencies) -> str:
    if latencies.exact:
        return "Each is the time of one request, exact. A request that is not streamed has no first token of its own."
    return (
        f"≈: so many requests are counted in buckets; each time is within {figures.percent(ERROR)} of the true one. "
        "A request that is not streamed has no first token of its own."
    )


def _quantile_cell(value: Decimal | None, *, exact: bool) -> Cell:
    if exact or value is None:
        return Cell(figures.duration(value))
    return Cell(
        f"≈ {figures.duration(value)}", f"within {figures.percent(ERROR)}, from {BOUNDS[0]} s to {BOUNDS[-1]} s"
    )
