"""Names and values that belong together, as a grid: tokens of a request, its ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import streamlit as st


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    name: str
    value: str
    hint: str = ""
    code: bool = False  # an identifier, to be copied


def show(facts: Sequence[Fact]) -> None:
    st.html(f'<dl class="pw-facts">{"".join(_entry(fact) for fact in facts)}</dl>')


def _entry(fact: Fact) -> str:
    value = escape(fact.value)
    value = f"<code>{value}</code>" if fact.code else value
    return f'<div title="{escape(fact.hint)}"><dt>{escape(fact.name)}</dt><dd>{value}</dd></div>'
