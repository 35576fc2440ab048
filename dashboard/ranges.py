"""Which time a page is about: a preset that ends now, or a custom range. The URL keeps it over links and reloads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

import streamlit as st

from billing.rollup import next_quarter, quarter_of


class Preset(StrEnum):
    QUARTER = "15 min"
    HOUR = "1 hour"
    DAY = "24 hours"
    WEEK = "7 days"
    MONTH = "30 days"
    CUSTOM = "Custom"


_LENGTHS: Final = {
    Preset.QUARTER: timedelta(minutes=15),
    Preset.HOUR: timedelta(hours=1),
    Preset.DAY: timedelta(days=1),
    Preset.WEEK: timedelta(days=7),
    Preset.MONTH: timedelta(days=30),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRange:
    """Half-open, UTC."""

    start: datetime
    end: datetime
    follows_now: bool

    @property
    def length(self) -> timedelta:
        return self.end - self.start

    def now(self) -> TimeRange:
        """A range that ends now, moved to the present; another one as it is."""
        return ending_now(self.length) if self.follows_now else self

    def in_quarters(self) -> TimeRange:
        """By whole quarters of an hour; a range that ends now keeps its length and ends with the current one."""
        end = next_quarter(self.end)
        return replace(self, start=end - self.length if self.follows_now else quarter_of(self.start), end=end)

    def __str__(self) -> str:
        return f"{self.start:%d %b %Y %H:%M} – {self.end:%d %b %Y %H:%M} UTC"


def choose(title: str) -> TimeRange | None:
    """A page's title with the control beside it; a custom range has its own line, so that these stay where they are.

    None: the custom range is empty, and a note says so.
    """
    options = [preset.value for preset in Preset]
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="bottom", key="title-row"):
        st.title(title, anchor=False, width="content")
        chosen = st.segmented_control(
            "Time range", options, default=Preset.DAY.value, required=True, key="range", bind="query-params",
            label_visibility="collapsed",
        )  # fmt: skip
    preset = Preset(chosen or Preset.DAY)
    return _custom() if preset is Preset.CUSTOM else ending_now(_LENGTHS[preset])


def ending_now(length: timedelta) -> TimeRange:
    now = datetime.now(UTC)
    return TimeRange(start=now - length, end=now, follows_now=True)


def _custom() -> TimeRange | None:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=None)
    with st.container(horizontal=True, horizontal_alignment="right", key="custom-range"):
        start = st.datetime_input("From (UTC)", today, key="from", bind="query-params", width=230)
        end = st.datetime_input("To (UTC)", today + timedelta(days=1), key="to", bind="query-params", width=230)
    if start is None or end is None or start >= end:
        st.info("Choose a “To” after the “From”: this range is empty.", icon=":material/date_range:")
        return None
    return TimeRange(start=start.replace(tzinfo=UTC), end=end.replace(tzinfo=UTC), follows_now=False)
