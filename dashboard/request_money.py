"""How one request's price and cost were computed: quantity times unit, line by line, as in billing.rating."""

from __future__ import annotations

from decimal import Decimal
from typing import Final

import streamlit as st

from billing.listing import Detail, PriceLine, Request
from billing.rating import BOOK_CURRENCY
from dashboard import figures, table
from dashboard.table import Cell, Column, Row, Tone

_MILLION: Final = 1_000_000
_COLUMNS: Final = (
    Column(label="Line"),
    Column(label="Quantity", numeric=True),
    Column(label="Unit", numeric=True),
    Column(label="Amount", numeric=True, hint="Exact"),
)


def show(detail: Detail) -> None:
    request, price = detail.request, detail.price
    if price is not None and price.example:
        st.info(
            "Priced with an **example price**: set your own with `pennyweight price set`.", icon=":material/science:"
        )
    if request.unpriced:
        st.warning("**No price was in force.** `pennyweight price set` prices it too.", icon=":material/rule:")
    rows = [*_price_rows(request, price), *_cost_rows(detail)]
    table.show(_COLUMNS, rows, label="Price and cost", key="request-money")


def _price_rows(request: Request, price: PriceLine | None) -> list[Row]:
    if price is None:
        reason = "no price in force" if request.unpriced else "0: a failed request is not charged"
        return [_row("Price", "", "", reason, strong=True)]
    cached_unit = price.input if price.cached_input is None else price.cached_input
    lines = [
        ("Prompt tokens computed", request.prompt_tokens - request.cached_tokens, price.input),
        ("Prompt tokens from cache", request.cached_tokens, cached_unit),
        ("Completion tokens", request.completion_tokens, price.output),
    ]
    rows = [
        _row(name, figures.count(n), _per_million(unit, price.currency), figures.exact_money(n * unit, price.currency))
        for name, n, unit in lines
    ]
    if price.request:
        rows.append(_row("Request", "1", *(figures.exact_money(price.request, price.currency),) * 2))
    if price.device_second:
        amount = request.device_seconds * price.device_second
        unit = f"{figures.money(price.device_second, price.currency)} per second"
        rows.append(
            _row(
                "Device time",
                figures.duration(request.device_seconds),
                unit,
                figures.exact_money(amount, price.currency),
            )
        )
    return [*rows, _row("Price", "", "", figures.exact_money(request.price, price.currency), strong=True)]


def _cost_rows(detail: Detail) -> list[Row]:
    request = detail.request
    currency = request.currency or BOOK_CURRENCY
    served = next((a for a in detail.attempts if a.attempt == request.serving_attempt), None)
    if request.pending:
        return [_row("Cost", "", "", "follows with the worker's report")]
    if served is None or not served.used_ns:
        return [_row("Cost", "", "", "0: no device time served it", strong=True)]
    used = f"{figures.count(served.used_ns)} ns"
    if served.hourly is None:
        return [_row("Device time used", used, f"{served.device_kind} has no rate", figures.ABSENT)]
    unit = f"{figures.exact_money(served.hourly, currency)} per hour of {served.device_kind}"
    return [
        _row("Device time used", used, unit, figures.exact_money(request.cost, currency)),
        _row("Cost", "", "", figures.exact_money(request.cost, currency), strong=True),
    ]


def _per_million(unit: Decimal, currency: str) -> str:
    return f"{figures.exact_money(unit * _MILLION, currency)} per 1M"


def _row(name: str, quantity: str, unit: str, amount: str, *, strong: bool = False) -> Row:
    tone = Tone.STRONG if strong else Tone.PLAIN
    return Row(cells=[Cell(name, tone=tone), Cell(quantity), Cell(unit, tone=Tone.MUTED), Cell(amount, tone=tone)])
