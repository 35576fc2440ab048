"""Charts over time, in UTC and in the colours of ``dashboard.theme``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Final

import altair as alt
import pandas as pd

from billing.trends import Point
from dashboard import figures, theme

_HEIGHT: Final = 280
_HOUR: Final = 3600
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_CURVE: Final = 4  # of fewer points each is drawn as a level over its stretch: a curve would claim to know between
_MOST_TICKS: Final = 10
_STEPS: Final = (
    *(timedelta(minutes=minutes) for minutes in (5, 15, 30)),
    *(timedelta(hours=hours) for hours in (1, 3, 6, 12)),
    *(timedelta(days=days) for days in (1, 2, 5, 10, 30, 100, 400)),
)
_SHORTEST: Final = timedelta(minutes=1)  # a shorter stretch says nothing about an hour


_SERIES: Final = (
    ("Revenue", theme.REVENUE),
    ("Cost, usage basis", theme.COST),
    ("Cost, fully loaded", theme.FULL_COST),
)


def money_over_time(points: Sequence[Point], currency: str, *, since: datetime, until: datetime) -> alt.LayerChart:
    """Amounts per hour: a stretch cut by ``since`` or ``until`` stands at its true level; sums in the tooltip."""
    frame = _long_frame([_Stretch(point, max(point.start, since), min(point.end, until)) for point in points], currency)
    names = [name for name, _ in _SERIES]
    few = len(points) < _CURVE
    axis = alt.X(
        "start:T" if few else "middle:T",
        title=None,
        scale=alt.Scale(type="utc", domain=[_instant(since), _instant(until)]),
        axis=alt.Axis(grid=False, labelExpr=_CLOCK, labelOverlap=True, values=_ticks(since, until)),
    )
    base = alt.Chart(frame).encode(
        x=axis,
        y=alt.Y("hourly:Q", title=None, axis=alt.Axis(labelExpr=_axis_label(currency), tickCount=5)),
        color=alt.Color(
            "series:N",
            sort=names,
            scale=alt.Scale(domain=names, range=[colour for _, colour in _SERIES]),
            legend=None,  # ``legend`` below wraps on a phone, Vega's is cut off
        ),
    )
    dash = alt.StrokeDash("series:N", scale=alt.Scale(domain=names, range=[[1, 0], [1, 0], [5, 3]]), legend=None)
    bars = base.mark_rule(strokeWidth=3).encode(x2="end:T")
    lines = base.mark_line(interpolate="monotone", strokeWidth=2.25)
    dots = base.mark_circle(size=60 if few else 18, opacity=1).encode(
        tooltip=[
            alt.Tooltip("when:N", title="UTC"),
            alt.Tooltip("series:N", title="Series"),
            alt.Tooltip("exact:N", title="Sum"),
            alt.Tooltip("shown:N", title="Per hour"),
        ]
    )
    return alt.LayerChart(layer=[(bars if few else lines).encode(strokeDash=dash), dots]).properties(height=_HEIGHT)


def _instant(moment: datetime) -> alt.DateTime:
    """As Vega has it, in UTC: a bare number would not be read as a time."""
    return alt.DateTime(
        year=moment.year,
        month=moment.month,
        date=moment.day,
        hours=moment.hour,
        minutes=moment.minute,
        seconds=moment.second,
        utc=True,
    )


def _ticks(since: datetime, until: datetime) -> list[alt.DateTime]:
    """At round times of UTC, each with a label of its own."""
    step = next((step for step in _STEPS if (until - since) / step <= _MOST_TICKS), _STEPS[-1])
    first = since + (_EPOCH - since) % step
    return [_instant(first + n * step) for n in range(int((until - first) / step) + 1)]


def legend() -> str:
    """HTML."""
    entries = "".join(f'<li><i style="background:{colour}"></i>{name}</li>' for name, colour in _SERIES)
    return f'<div class="pw-shares pw-key"><ul class="pw-legend">{entries}</ul></div>'


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A point, and the time it really covers."""

    point: Point
    start: datetime
    end: datetime

    @property
    def amounts(self) -> tuple[Decimal, Decimal, Decimal]:
        """In the order of _SERIES."""
        return self.point.revenue, self.point.cost, self.point.loaded_cost

    def hourly(self, amount: Decimal) -> Decimal:
        return amount * _HOUR / Decimal((self.end - self.start).total_seconds())


def _long_frame(stretches: Sequence[_Stretch], currency: str) -> pd.DataFrame:
    """One row per stretch and series; floats for the drawing, exact amounts as text for the tooltip."""
    return pd.DataFrame(
        [
            {
                "start": stretch.start,
                "end": stretch.end,
                "middle": stretch.start + (stretch.end - stretch.start) / 2,
                "when": f"{stretch.start:%d %b %H:%M} – {stretch.end:%H:%M}",
                "series": name,
                "hourly": float(stretch.hourly(amount)),
                "exact": figures.exact_money(amount, currency),
                "shown": figures.money(stretch.hourly(amount), currency),
            }
            for stretch in stretches
            if stretch.end - stretch.start >= _SHORTEST
            for (name, _), amount in zip(_SERIES, stretch.amounts, strict=True)
        ]
    )


# Vega expressions: midnight says its day; amounts have three digits, with an exponent only where zeros would hide them.
_CLOCK: Final = (
    "utchours(datum.value) === 0 && utcminutes(datum.value) === 0"
    " ? utcFormat(datum.value, '%d %b') : utcFormat(datum.value, '%H:%M')"
)


def _axis_label(currency: str) -> str:
    unit = figures.unit(currency)
    return (
        f"'{unit}' + (abs(datum.value) >= 1e-6 || datum.value === 0"
        " ? format(datum.value, ',.3~r') : format(datum.value, '.2~e'))"
    )
