"""The headline numbers of *Unit economics*, and the sentence that explains the two bases in these numbers."""

from __future__ import annotations

from decimal import Decimal
from html import escape
from typing import Final

from billing.economics import Line, Report
from dashboard import figures
from dashboard.cards import Card

_NS: Final = 1e9


def headline(report: Report) -> list[Card]:
    total, currency = report.total, report.currency
    loaded = report.device_time.costs.total
    return [
        _amount("Revenue", total.revenue, total, currency),
        _amount("Cost, usage basis", total.cost, total, currency),
        _margin("Margin, usage basis", total.revenue - total.cost, total.revenue, currency),
        _amount("Cost, fully loaded", loaded, total, currency),
        _margin("Margin, fully loaded", total.revenue - loaded, total.revenue, currency),
        Card(label="Requests", value=figures.short_count(total.requests), detail=outcomes(total)),
        *_token_cards(total),
        *_device_cards(report),
    ]


def _token_cards(total: Line) -> list[Card]:
    return [
        Card(
            label="Tokens in",
            value=figures.short_count(total.prompt_tokens),
            detail=f"{figures.share(total.cached_tokens, total.prompt_tokens)} from cache",
            exact=f"{figures.count(total.prompt_tokens)}, of which {figures.count(total.cached_tokens)} from cache",
        ),
        Card(
            label="Tokens out",
            value=figures.short_count(total.completion_tokens),
            detail="billed",
            exact=figures.count(total.completion_tokens),
        ),
    ]


def _device_cards(report: Report) -> list[Card]:
    time, currency = report.device_time, report.currency
    spans = time.spans
    return [
        Card(
            label="Utilisation",
            value=figures.percent(time.utilisation),
            detail=f"of {figures.duration(spans.wall / _NS)}",
            exact=f"busy {figures.duration(spans.busy / _NS)} of {figures.duration(spans.wall / _NS)}",
        ),
        Card(
            label="Idle",
            value=figures.duration(spans.idle / _NS),
            detail=f"costs {figures.money(time.costs.idle, currency)}",
            exact=figures.exact_money(time.costs.idle, currency),
        ),
    ]


def outcomes(line: Line) -> str:
    parts = ((line.cancelled, "cancelled"), (line.failed, "failed"))
    return ", ".join(f"{figures.short_count(number)} {name}" for number, name in parts if number) or "all completed"


def _amount(label: str, amount: Decimal, total: Line, currency: str) -> Card:
    return Card(
        label=label,
        value=figures.money(amount, currency),
        detail=f"{figures.money(total.per_million_tokens(amount), currency)} per 1M tokens",
        exact=figures.exact_money(amount, currency),
    )


def _margin(label: str, margin: Decimal, revenue: Decimal, currency: str) -> Card:
    return Card(
        label=label,
        value=figures.money(margin, currency),
        detail=f"{figures.share(margin, revenue)} of revenue",
        exact=figures.exact_money(margin, currency),
        bad=margin < 0,
    )


def explanation(report: Report) -> str:
    """HTML."""
    time = report.device_time
    usage, loaded = (escape(figures.money(amount, report.currency)) for amount in (report.total.cost, time.costs.total))
    return (
        f"<b>Usage basis</b> counts only the device time that served these requests: {usage}. <b>Fully loaded</b> "
        f"counts all the time the devices were up, idle, loading, overhead and waste included: {loaded}. "
        f"The two meet as utilisation, now {figures.percent(time.utilisation)}, rises. By tenant and by model, "
        "the fully loaded cost of all devices together is shared out in proportion to usage cost, so it also "
        "moves when devices idle or load, or when others use them more or less."
    )


def examples(report: Report) -> str:
    """Markdown: how much rests on example prices and rates; empty where nothing does, or where there is no request."""
    total, time, currency = report.total, report.device_time, report.currency
    parts = []
    if total.example_priced:
        part, whole = (_markdown_money(amount, currency) for amount in (total.example_revenue, total.revenue))
        of = f"{figures.count(total.example_priced)} of {figures.count(total.requests)} requests"
        parts.append(f"**{of}** were charged by **example prices**: {part} of {whole} revenue.")
    if time.example_cost and total.requests:
        part, whole = (_markdown_money(amount, currency) for amount in (time.example_cost, time.costs.total))
        parts.append(f"**{part} of {whole}** fully loaded cost rests on **example device rates**.")
    return " ".join(parts)


def _markdown_money(amount: Decimal, currency: str) -> str:
    """Two dollar signs in a line would be a formula."""
    return figures.money(amount, currency).replace("$", "\\$")
