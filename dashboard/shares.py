"""One bar of parts that make a whole (device time, stages of a request), with a legend that carries the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import streamlit as st


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    label: str
    size: float  # any unit, the same for all; below 0 is drawn as 0
    text: str  # the size as the legend shows it
    detail: str = ""  # beside it
    colour: str
    hint: str = ""


def show(parts: Sequence[Part], *, label: str) -> None:
    st.html(
        f'<div class="pw-shares" role="img" aria-label="{escape(label)}">'
        f'<div class="pw-bar">{"".join(_segment(p) for p in parts if p.size > 0)}</div>'
        f'<ul class="pw-legend">{"".join(_entry(p) for p in parts)}</ul></div>'
    )


def _segment(part: Part) -> str:
    title = escape(f"{part.label}: {part.text} {part.detail}".strip())
    return f'<span style="flex-grow:{part.size:.9f};background:{part.colour}" title="{title}"></span>'


def _entry(part: Part) -> str:
    return (
        f'<li title="{escape(part.hint)}"><i style="background:{part.colour}"></i>{escape(part.label)}'
        f"<b>{escape(part.text)}</b><small>{escape(part.detail)}</small></li>"
    )
