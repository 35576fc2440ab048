"""CSV with every digit, for those who go on in a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

import streamlit as st


def button(rows: Sequence[Mapping[str, object]], *, name: str) -> None:
    """Nothing to download, no button."""
    if rows:
        st.download_button(
            "CSV", as_csv(rows), f"{name}.csv", "text/csv", key=f"download-{name}", icon=":material/download:",
            type="tertiary", help="Every digit, no rounding", on_click="ignore",
        )  # fmt: skip


def as_csv(rows: Sequence[Mapping[str, object]]) -> str:
    """A value that a spreadsheet would take for a formula gets an apostrophe before it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0])
    writer.writerows([_harmless(value) for value in row.values()] for row in rows)
    return text.getvalue()


def _harmless(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value[:1] in {"=", "+", "-", "@", "\t"} else value
