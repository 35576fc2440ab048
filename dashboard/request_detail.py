"""One request: its stages, tokens, attempts, how its price and its cost were computed, and its ids."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Literal
from uuid import UUID

import streamlit as st

from billing.listing import AttemptLine, Detail, Request, get_request
from billing.rating import BOOK_CURRENCY
from dashboard import cards, facts, figures, login, request_money, shares, table, theme
from dashboard.cards import Card
from dashboard.database import guarded, reading
from dashboard.facts import Fact
from dashboard.settings import Settings
from dashboard.shares import Part
from dashboard.table import Cell, Column, Row, Tone

_FOLLOW: Final = "2s"
_NS: Final = 1e9
_COLOURS: Final[dict[str, Literal["green", "orange", "red"]]] = {
    "completed": "green",
    "cancelled": "orange",
    "failed": "red",
}


def show(settings: Settings, request_id: str, *, on_back: Callable[[], None]) -> None:
    st.button("All requests", icon=":material/arrow_back:", type="tertiary", on_click=on_back, key="back")
    try:
        wanted = UUID(request_id)
    except ValueError:
        st.info("**This is not the id of a request.** Choose one from the list.", icon=":material/search_off:")
        return
    with reading(settings.database_url) as connection:
        found = get_request(connection, wanted)
    whole = found is not None and not found.request.pending
    st.fragment(run_every=None if whole else _FOLLOW)(partial(guarded, partial(_show, settings, wanted)))()


def _show(settings: Settings, request_id: UUID) -> None:
    login.renew(settings)
    with reading(settings.database_url) as connection:
        detail = get_request(connection, request_id)
    if detail is None:
        st.info(
            "**The books do not have this request.** It is still running, or it was never admitted. "
            "This page looks again every two seconds.",
            icon=":material/search_off:",
        )
        return
    request = detail.request
    _head(request)
    cards.show(_cards(request))
    st.subheader("Stages", anchor=False)
    shares.show(_stages(detail), label="Stages of the request")
    st.subheader("Tokens", anchor=False)
    facts.show(_tokens(request))
    st.subheader("Price and cost", anchor=False)
    request_money.show(detail)
    st.subheader("Attempts", anchor=False)
    _attempts(detail)
    st.subheader("Names and ids", anchor=False)
    facts.show(_names(request))


def _head(request: Request) -> None:
    with st.container(horizontal=True, vertical_alignment="center", key="request-head"):
        st.title(f"{request.tenant} · {request.model}", anchor=False, width="content")
        st.badge(request.status, color=_COLOURS.get(request.status, "gray"))
    how = "streamed" if request.stream else "not streamed"
    reasons = [reason for reason in (request.finish_reason, request.error_code) if reason not in {"", request.status}]
    st.caption(" · ".join([f"{figures.moment(request.created_at)} UTC", request.endpoint, how, *reasons]))
    if request.swept:
        st.info("Settled by the sweeper: the API process that served it ended before it could.", icon=":material/mop:")


def _cards(request: Request) -> list[Card]:
    currency = request.currency or BOOK_CURRENCY
    speed = None if not request.stream or not request.tpot_seconds else 1 / request.tpot_seconds
    margin = request.margin
    return [
        Card(
            label="Price",
            value="no price" if request.unpriced else figures.money(request.price, currency),
            exact=figures.exact_money(request.price, currency),
            detail="what the tenant pays",
        ),
        Card(
            label="Cost",
            value="no rate" if request.uncosted else figures.money(request.cost, currency),
            exact=figures.exact_money(request.cost, currency),
            detail=f"{figures.duration(request.device_seconds)} of device time",
        ),
        Card(
            label="Margin",
            value=figures.money(margin, currency),
            exact=figures.exact_money(margin, currency),
            detail=f"{figures.share(margin, request.price)} of the price"
            if margin is not None and request.price
            else "",
            bad=margin is not None and margin < 0,
        ),
        Card(
            label="First token",
            value=figures.duration(request.ttft_seconds if request.stream else None),
            detail="until it was sent" if request.stream else "not streamed: sent at the end",
        ),
        Card(
            label="Total",
            value=figures.duration(request.total_seconds),
            detail="" if speed is None else f"{figures.three_digits(float(speed))} tokens per second",
        ),
    ]


def _stages(detail: Detail) -> list[Part]:
    """Of the attempt that served; what no stage of it explains is named as the rest."""
    request = detail.request
    served = next((a for a in detail.attempts if a.attempt == request.serving_attempt), None)
    queue = float(request.queue_seconds or 0)
    prefill, decode = (served.prefill_ns / _NS, served.decode_ns / _NS) if served else (0.0, 0.0)
    rest = float(request.total_seconds) - queue - prefill - decode
    stages = [
        ("Queue", queue, theme.QUEUE, "enqueued until first scheduled"),
        ("Prefill", prefill, theme.PREFILL, "first scheduled until the first token"),
        ("Decode", decode, theme.DECODE, "first token until the end"),
        ("Rest", max(rest, 0.0), theme.OTHER, "reading, tokenising, sending, and earlier attempts"),
    ]
    total = max(queue + prefill + decode + max(rest, 0.0), 1e-9)
    return [
        Part(
            label=label,
            size=size,
            text=figures.duration(size),
            detail=figures.percent(size / total),
            colour=colour,
            hint=hint,
        )
        for label, size, colour, hint in stages
    ]


def _tokens(request: Request) -> list[Fact]:
    return [
        Fact(name="Prompt", value=figures.count(request.prompt_tokens)),
        Fact(
            name="From cache", value=figures.count(request.cached_tokens), hint="part of the prompt, not computed again"
        ),
        Fact(name="Generated", value=figures.count(request.generated_tokens), hint="drawn by the worker"),
        Fact(name="Delivered", value=figures.count(request.delivered_tokens), hint="accepted by the server's send"),
        Fact(
            name="Billed", value=figures.count(request.completion_tokens), hint="0, or delivered ≤ billed ≤ generated"
        ),
    ]


_ATTEMPT_COLUMNS: Final = (
    Column(label="Attempt"),
    Column(label="Outcome"),
    Column(label="Device"),
    Column(label="Worker"),
    Column(label="Queue", numeric=True),
    Column(label="Prefill", numeric=True),
    Column(label="Decode", numeric=True),
    Column(label="Used", numeric=True, hint="Device time that served the request"),
    Column(label="Wasted", numeric=True, hint="Device time that served nobody"),
    Column(label="Steps", numeric=True),
    Column(label="Peak batch", numeric=True, hint="Most sequences in one of its steps"),
    Column(label="Preempted", numeric=True),
)


def _attempts(detail: Detail) -> None:
    if not detail.attempts:
        st.caption(
            "The worker's report has not come yet." if detail.request.pending else "No attempt reached a worker."
        )
        return
    serving = detail.request.serving_attempt
    table.show(_ATTEMPT_COLUMNS, [_attempt_row(a, serving) for a in detail.attempts], label="Attempts", key="attempts")


def _attempt_row(attempt: AttemptLine, serving: int | None) -> Row:
    causes = ", ".join(f"{cause} {figures.duration(ns / _NS)}" for cause, ns in attempt.waste.items() if ns)
    served = attempt.attempt == serving
    return Row(
        cells=[
            Cell(f"{attempt.attempt}"),
            Cell(attempt.outcome, attempt.error, Tone.GOOD if served else Tone.WARN),
            Cell(attempt.device, attempt.device_kind),
            Cell(attempt.worker, tone=Tone.MUTED),
            *(table.duration_cell(ns) for ns in (attempt.queue_ns, attempt.prefill_ns, attempt.decode_ns)),
            table.duration_cell(attempt.used_ns),
            Cell(
                f"{figures.duration(attempt.wasted_ns / _NS)} ({causes})" if causes else figures.duration(0),
                figures.exact_duration(attempt.wasted_ns),
            ),
            *(Cell(figures.count(n)) for n in (attempt.steps, attempt.peak_batch, attempt.preemptions)),
        ]
    )


def _names(request: Request) -> list[Fact]:
    known = [
        ("Request", str(request.id)),
        ("Trace", request.trace_id),
        ("Key", f"{request.key_prefix}…" if request.key_prefix else ""),
        ("Deployment", request.deployment_id),
        ("Revision", request.revision),
        ("Arm", request.arm),
        ("Batch", str(request.batch_id or "")),
        ("Tenant", str(request.tenant_id)),
    ]
    return [Fact(name=name, value=value, code=True) for name, value in known if value]
