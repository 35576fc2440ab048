"""A table of formatted text: exact values as tooltips, and rows that can be opened.

Streamlit's own table is a canvas that names a selected row by its position; while new rows come in at the top, that
would open another row than the one that was clicked. Here a click sends the row's own id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Final

import streamlit as st

from dashboard import figures

_HERE: Final = Path(__file__).parent
_NS: Final = 1e9
_mount = st.components.v2.component(
    "pennyweight.table",
    html='<div class="frame"><table></table></div>',
    css=(_HERE / "table.css").read_text(),
    js=(_HERE / "table.js").read_text(),
)


class Tone(StrEnum):
    PLAIN = ""
    MUTED = "muted"
    STRONG = "strong"  # a sum
    BAD = "bad"  # a negative margin
    GOOD = "good"  # with a dot: a status
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    label: str
    numeric: bool = False
    hint: str = ""
    wide: bool = False  # only where there is room


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    hint: str = ""
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    cells: Sequence[Cell]
    id: str = ""  # empty: cannot be opened


def money_cell(amount: Decimal | None, currency: str) -> Cell:
    return Cell(figures.money(amount, currency), figures.exact_money(amount, currency))


def duration_cell(ns: int) -> Cell:
    return Cell(figures.duration(ns / _NS), figures.exact_duration(ns))


def show(
    columns: Sequence[Column],
    rows: Sequence[Row],
    *,
    label: str,
    key: str,
    on_open: Callable[[str], None] | None = None,
) -> None:
    """``on_open`` gets the id of a row that was clicked, before the page runs again."""

    def opened() -> None:
        if on_open is not None and (row_id := st.session_state[key].opened):
            on_open(row_id)

    data = {"label": label, "columns": [asdict(c) for c in columns], "rows": [asdict(r) for r in rows]}
    _mount(key=key, data=data, on_opened_change=opened)
