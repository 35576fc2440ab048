"""Page *Unit economics*: what came in, what it cost on both bases, and where the device time went."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Final

import streamlit as st

from billing import economics, trends
from billing.economics import DeviceTime, Report
from billing.trends import Latencies, Point
from dashboard import cards, charts, economics_cards, economics_tables, figures, login, ranges, shares, theme
from dashboard.database import guarded, reading
from dashboard.ranges import TimeRange
from dashboard.settings import Settings
from dashboard.shares import Part

_REFRESH: Final = "10s"
_POINTS: Final = 60
_NS: Final = 1e9
_TOO_SMALL: Final = 10_000  # a part below a ten thousandth is not drawn: cutting at quarters leaves odd nanoseconds


def show(settings: Settings) -> None:
    chosen = ranges.choose("Unit economics")
    if chosen is not None:
        refresh = _REFRESH if chosen.follows_now else None
        st.fragment(run_every=refresh)(partial(guarded, partial(_show_range, settings, chosen)))()


def _show_range(settings: Settings, chosen: TimeRange) -> None:
    login.renew(settings)
    period = chosen.now().in_quarters()
    with reading(settings.database_url) as connection:
        report = economics.report(connection, period.start, period.end)
        points = trends.points(connection, period.start, period.end, at_most=_POINTS)
        latencies = trends.latencies(connection, period.start, period.end)
    _caption(report)
    if not report.total.requests:
        _note_nothing(settings, report)
        if not report.device_time.spans.wall:
            return
    _notes(report)
    cards.show(economics_cards.headline(report))
    st.html(f'<p class="pw-explain">{economics_cards.explanation(report)}</p>')
    _over_time(points, report)
    _device_time(report.device_time, report.currency)
    economics_tables.by_tenant(report)
    economics_tables.by_model(report)
    _latency(latencies)


def _caption(report: Report) -> None:
    waiting = " Newest records are being added up." if report.dirty else ""
    st.caption(
        f"{report.start:%d %b %Y %H:%M} – {report.end:%d %b %Y %H:%M} UTC, by whole quarters of an hour.{waiting}"
    )


def _notes(report: Report) -> None:
    """What is not, or not yet, in the sums: said before them."""
    if examples := economics_cards.examples(report):
        st.info(
            f"{examples} Set your own with `pennyweight price set` and `pennyweight device-rate set`.",
            icon=":material/science:",
        )
    total = report.total
    for number, text in (
        (total.unpriced, "without a price, not in the revenue. `pennyweight price set` prices them too."),
        (total.uncosted, "on a device without a rate, not in the cost. `pennyweight device-rate set` costs them too."),
        (total.pending, "waiting for their worker's report. Their cost follows."),
    ):
        if number:
            plural = "request" if number == 1 else "requests"
            st.warning(f"**{figures.count(number)} {plural}** {text}", icon=":material/rule:")
    if uncosted := report.device_time.uncosted_ns:
        st.warning(
            f"**{figures.duration(uncosted / _NS)}** of device time without a rate, not in the fully loaded cost.",
            icon=":material/rule:",
        )


def _note_nothing(settings: Settings, report: Report) -> None:
    devices = " Devices were up, and what they cost is below." if report.device_time.spans.wall else ""
    st.info(
        f"**No requests in this range.**{devices} Choose a longer one, or send a request to "
        f"`{settings.api_url.rstrip('/')}/v1/chat/completions`: it is in these sums within 15 seconds.",
        icon=":material/inbox:",
    )


def _over_time(points: list[Point], report: Report) -> None:
    st.subheader("Revenue and cost per hour", anchor=False)
    until = min(report.end, datetime.now(UTC))
    chart = charts.money_over_time(points, report.currency, since=report.start, until=until)
    st.html(charts.legend())
    st.altair_chart(chart, key="money-over-time")


def _device_time(time: DeviceTime, currency: str) -> None:
    spans, costs = time.spans, time.costs
    parts = (
        ("Busy", spans.busy, costs.busy, theme.BUSY, "steps that served requests"),
        ("Idle", spans.idle, costs.idle, theme.IDLE, "no request was there"),
        ("Loading", spans.loading, costs.loading, theme.LOADING, "weights into memory"),
        ("Overhead", spans.overhead, costs.overhead, theme.OVERHEAD, "scheduling and messages between steps"),
        ("Waste", spans.waste, costs.waste, theme.WASTE, "lost, repeated or failed work"),
        ("Unaccounted", spans.unaccounted, costs.unaccounted, theme.OTHER, "between the measured spans"),
    )
    st.subheader("Where device time went", anchor=False)
    shares.show(
        [
            Part(
                label=label,
                size=ns / _NS,
                text=figures.share(ns, spans.wall),
                detail=f"{figures.duration(ns / _NS)} · {figures.money(cost, currency)}",
                colour=colour,
                hint=hint,
            )
            for label, ns, cost, colour, hint in parts
            if abs(ns) >= spans.wall / _TOO_SMALL
        ],
        label="Composition of device time",
    )


def _latency(latencies: Latencies) -> None:
    st.subheader("Latency", anchor=False)
    economics_tables.latency(latencies)
    st.caption(economics_tables.latency_note(latencies))
