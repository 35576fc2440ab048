"""Page *Requests*: one by one, newest first, with what each took and cost. New ones appear by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final
from uuid import UUID

import streamlit as st

from billing.listing import Filter, Request, choices, list_requests
from billing.rating import BOOK_CURRENCY
from billing.tenants import list_tenants
from dashboard import figures, login, ranges, request_detail, table
from dashboard.database import guarded, reading
from dashboard.ranges import TimeRange
from dashboard.settings import Settings
from dashboard.table import Cell, Column, Row, Tone

OPEN: Final = "request"  # the query parameter that names the opened request
_VIEW: Final = "requests-view"  # session state: what was listed
_PAGES: Final = "requests-pages"  # session state: where the pages before the shown one began
_FOLLOW: Final = "1s"
_SIZE: Final = 50
_ALL: Final = "All"
_STATUSES: Final = ("completed", "cancelled", "failed")
_TONES: Final = {"completed": Tone.GOOD, "cancelled": Tone.WARN, "failed": Tone.FAIL}

_COLUMNS: Final = (
    Column(label="Made (UTC)"),
    Column(label="Status"),
    Column(label="Tenant"),
    Column(label="Model"),
    Column(label="Endpoint", wide=True),
    Column(label="In", numeric=True, hint="Prompt tokens", wide=True),
    Column(label="Out", numeric=True, hint="Billed completion tokens"),
    Column(
        label="First token",
        numeric=True,
        hint="Streamed requests: from request read until the first content was sent",
        wide=True,
    ),
    Column(label="Total", numeric=True, hint="From request read until its end"),
    Column(label="Device", numeric=True, hint="Measured device time that served it"),
    Column(label="Price", numeric=True),
    Column(label="Cost", numeric=True, hint="Device time at the device's rate"),
    Column(label="Margin", numeric=True, hint="Price less cost, as a share of the price"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """What the reader chose: fixed while the list follows."""

    chosen: TimeRange
    tenant_id: UUID | None
    model: str | None
    status: str | None
    endpoint: str | None

    @property
    def is_filtered(self) -> bool:
        return any((self.tenant_id, self.model, self.status, self.endpoint))

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal while the reader has changed nothing, though a range that ends now moves."""
        period = self.chosen.length if self.chosen.follows_now else (self.chosen.start, self.chosen.end)
        return (period, self.tenant_id, self.model, self.status, self.endpoint)

    def filter(self) -> Filter:
        period = self.chosen.now()
        return Filter(
            start=period.start,
            end=period.end,
            tenant_id=self.tenant_id,
            model=self.model,
            status=self.status,
            endpoint=self.endpoint,
        )


def show(settings: Settings) -> None:
    if opened := st.query_params.get(OPEN):
        request_detail.show(settings, opened, on_back=_close)
        return
    chosen = ranges.choose("Requests")
    if chosen is None:
        return
    view = _choose(settings, chosen)
    if st.session_state.get(_VIEW) != view.identity:
        st.session_state[_VIEW], st.session_state[_PAGES] = view.identity, []
    follows = chosen.follows_now and not st.session_state[_PAGES]
    st.fragment(run_every=_FOLLOW if follows else None)(partial(guarded, partial(_list, settings, view)))()


def _choose(settings: Settings, chosen: TimeRange) -> _View:
    with reading(settings.database_url) as connection:
        tenants = {tenant.name: tenant.id for tenant in list_tenants(connection)}
        used = choices(connection, chosen.start, chosen.end)
    with st.container(key="filters"):
        tenant, model, status, endpoint = (
            _select(label, options)
            for label, options in (
                ("Tenant", list(tenants)),
                ("Model", used["model"]),
                ("Status", _STATUSES),
                ("Endpoint", used["endpoint"]),
            )
        )
    return _View(
        chosen=chosen, tenant_id=tenants[tenant] if tenant else None, model=model, status=status, endpoint=endpoint
    )


def _select(label: str, options: Sequence[str]) -> str | None:
    """None: all. A choice that the range no longer offers stays choosable, so that the list does not change unasked."""
    key = label.lower()
    kept = st.session_state.get(key)
    extra = [kept] if kept not in {None, _ALL, *options} else []
    chosen = st.selectbox(label, [_ALL, *options, *extra], key=key, bind="query-params")
    return None if chosen == _ALL else chosen


def _list(settings: Settings, view: _View) -> None:
    login.renew(settings)
    if OPEN in st.query_params:  # a row was clicked in a run of this fragment alone
        st.rerun()
    pages: list[UUID] = st.session_state[_PAGES]
    with reading(settings.database_url) as connection:
        found = list_requests(connection, view.filter(), before=pages[-1] if pages else None, limit=_SIZE + 1)
    requests, more = found[:_SIZE], len(found) > _SIZE
    if not requests:
        _note_none(settings, view)
        return
    now = datetime.now(UTC)
    table.show(_COLUMNS, [_row(request, now) for request in requests], label="Requests", key="requests", on_open=_open)
    _pager(requests, more=more, follows=view.chosen.follows_now and not pages)


def _open(request_id: str) -> None:
    st.query_params[OPEN] = request_id


def _close() -> None:
    del st.query_params[OPEN]


def _pager(requests: Sequence[Request], *, more: bool, follows: bool) -> None:
    pages: list[UUID] = st.session_state[_PAGES]
    with st.container(horizontal=True, vertical_alignment="center", key="pager"):
        if st.button("Newer", disabled=not pages, icon=":material/chevron_left:", key="newer"):
            pages.pop()
            st.rerun()
        if st.button("Older", disabled=not more, icon=":material/chevron_right:", icon_position="right", key="older"):
            pages.append(requests[-1].id)
            st.rerun()
        first = len(pages) * _SIZE + 1
        where = f"{first:,} – {first + len(requests) - 1:,}"
        st.caption(f"{where} · new requests appear by themselves" if follows else where)


def _row(request: Request, now: datetime) -> Row:
    currency = request.currency or BOOK_CURRENCY
    return Row(
        id=str(request.id),
        cells=[
            Cell(figures.clock_time(request.created_at, now), figures.moment(request.created_at)),
            Cell(request.status, request.error_code or request.finish_reason, _TONES.get(request.status, Tone.PLAIN)),
            Cell(request.tenant),
            Cell(request.model),
            Cell(request.endpoint.removeprefix("/v1/"), "streamed" if request.stream else "not streamed", Tone.MUTED),
            Cell(figures.count(request.prompt_tokens), f"{figures.count(request.cached_tokens)} from cache"),
            Cell(figures.count(request.completion_tokens)),
            _first_token_cell(request),
            Cell(figures.duration(request.total_seconds)),
            Cell(figures.duration(request.device_seconds), _waste(request)),
            _price_cell(request, currency),
            _cost_cell(request, currency),
            _margin_cell(request, currency),
        ],
    )


def _first_token_cell(request: Request) -> Cell:
    if not request.stream:
        return Cell(figures.ABSENT, "not streamed: sent with the last one", Tone.MUTED)
    return Cell(figures.duration(request.ttft_seconds))


def _waste(request: Request) -> str:
    return f"and {figures.duration(request.waste_seconds)} wasted" if request.waste_seconds else ""


def _price_cell(request: Request, currency: str) -> Cell:
    return Cell("no price", tone=Tone.BAD) if request.unpriced else table.money_cell(request.price, currency)


def _cost_cell(request: Request, currency: str) -> Cell:
    if request.pending:
        return Cell("…", "waits for the worker's report", Tone.MUTED)
    return Cell("no rate", tone=Tone.BAD) if request.uncosted else table.money_cell(request.cost, currency)


def _margin_cell(request: Request, currency: str) -> Cell:
    margin = request.margin
    if margin is None or not request.price:
        return Cell(figures.ABSENT, figures.exact_money(margin, currency), Tone.MUTED)
    tone = Tone.BAD if margin < 0 else Tone.PLAIN
    return Cell(figures.share(margin, request.price), figures.exact_money(margin, currency), tone)


def _note_none(settings: Settings, view: _View) -> None:
    if view.is_filtered:
        st.info("**No request matches.** Widen the time range or set a filter to “All”.", icon=":material/filter_alt:")
        return
    st.info(
        "**No request in this time range.** Send one to "
        f"`{settings.api_url.rstrip('/')}/v1/chat/completions`: it appears here by itself.",
        icon=":material/inbox:",
    )
