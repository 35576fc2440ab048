"""Headline numbers as a grid of small cards that flows from five columns to two on a phone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import streamlit as st


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    label: str
    value: str
    detail: str = ""  # a second line
    exact: str = ""  # tooltip of the value
    bad: bool = False  # a negative margin


def show(cards: Sequence[Card]) -> None:
    st.html(f'<div class="pw-cards">{"".join(_card(card) for card in cards)}</div>')


def _card(card: Card) -> str:
    bad = " pw-bad" if card.bad else ""
    return (
        f'<div class="pw-card"><div class="pw-label">{escape(card.label)}</div>'
        f'<div class="pw-value{bad}" title="{escape(card.exact)}">{escape(card.value)}</div>'
        f'<div class="pw-detail">{escape(card.detail)}</div></div>'
    )
