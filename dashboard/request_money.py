"""How one request's price and cost were computed: quantity times unit, line by line, as in billing.rating."""

from __future__ import annotations

from dataclasses import replace
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
    Column(label="Amount", numeric=True, hint="Point at an amount for all its digits"),
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
        return [_sum_row("Price", Cell(reason))]
    cached_unit = price.input if price.cached_input is None else price.cached_input
    lines = [
        ("Prompt tokens computed", request.prompt_tokens - request.cached_tokens, price.input),
        ("Prompt tokens from cache", request.cached_tokens, cached_unit),
        ("Completion tokens", request.completion_tokens, price.output),
    ]
    rows = [
        _row(name, Cell(figures.count(n)), _per_million(unit, price.currency), _money(n * unit, price.currency))
        for name, n, unit in lines
    ]
    if price.request:
        amount = _money(price.request, price.currency)
        rows.append(_row("Request", Cell("1"), amount, amount))
    if price.device_second:
        used = Cell(figures.duration(request.device_seconds), f"{request.device_seconds:,f} s")
        unit = _money(price.device_second, price.currency, per=" per second")
        rows.append(
            _row("Device time", used, unit, _money(request.device_seconds * price.device_second, price.currency))
        )
    return [*rows, _sum_row("Price", _money(request.price, price.currency))]


def _cost_rows(detail: Detail) -> list[Row]:
    request = detail.request
    currency = request.currency or BOOK_CURRENCY
    served = next((a for a in detail.attempts if a.attempt == request.serving_attempt), None)
    if request.pending:
        return [_sum_row("Cost", Cell("follows with the worker's report"))]
    if served is None or not served.used_ns:
        return [_sum_row("Cost", Cell("0: no device time served it"))]
    used = table.duration_cell(served.used_ns)
    if served.hourly is None:
        return [_row("Device time used", used, Cell(f"{served.device_kind} has no rate"), Cell(figures.ABSENT))]
    cost = _money(request.cost, currency)
    hourly = _money(served.hourly, currency, per=f" per hour of {served.device_kind}")
    return [_row("Device time used", used, hourly, cost), _sum_row("Cost", cost)]


def _per_million(unit: Decimal, currency: str) -> Cell:
    return _money(unit * _MILLION, currency, per=" per 1M")


def _money(amount: Decimal | None, currency: str, *, per: str = "") -> Cell:
    return Cell(f"{figures.money(amount, currency)}{per}", f"{figures.exact_money(amount, currency)}{per}")


def _row(name: str, quantity: Cell, unit: Cell, amount: Cell) -> Row:
    return Row(cells=[Cell(name), quantity, replace(unit, tone=Tone.MUTED), amount])


def _sum_row(name: str, amount: Cell) -> Row:
    return Row(cells=[Cell(name, tone=Tone.STRONG), Cell(""), Cell(""), replace(amount, tone=Tone.STRONG)])
