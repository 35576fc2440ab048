"""Colours and type, for light and dark: Streamlit's theme options and the colours of our charts.

One meaning, one colour, on every page: what comes in is teal, what requests cost is brass, what the machine costs
besides is grey, and what went wrong is red.
"""

from __future__ import annotations

from typing import Final

REVENUE: Final = "#0E8F83"
COST: Final = "#C98A1B"
FULL_COST: Final = "#8A6A3B"
BUSY: Final = "#0E8F83"
LOADING: Final = "#4C7FD9"
OVERHEAD: Final = "#8E7CC3"
WASTE: Final = "#D2544B"
IDLE: Final = "#B9C0C9"
QUEUE: Final = "#B9C0C9"
PREFILL: Final = "#4C7FD9"
DECODE: Final = "#0E8F83"
OTHER: Final = "#D9C9A3"

_LIGHT: Final = {
    "primaryColor": "#0B7A70",
    "backgroundColor": "#FFFFFF",
    "secondaryBackgroundColor": "#F4F5F3",
    "textColor": "#1B2430",
    "borderColor": "#E2E4E0",
    "linkColor": "#0B7A70",
}
_DARK: Final = {
    "primaryColor": "#2BB8A9",
    "backgroundColor": "#12161B",
    "secondaryBackgroundColor": "#1A2027",
    "textColor": "#E7EAED",
    "borderColor": "#2C343D",
    "linkColor": "#4CCBBE",
}

THEME: Final[dict[str, object]] = {
    "theme.baseRadius": "0.5rem",
    "theme.showWidgetBorder": True,
    "theme.linkUnderline": False,
    "theme.paddingTop": "1.5rem",
    "theme.headingFontSizes": ["1.9rem", "1.4rem", "1.15rem"],
    "theme.headingFontWeights": [700, 600, 600],
    **{f"theme.light.{name}": value for name, value in _LIGHT.items()},
    **{f"theme.dark.{name}": value for name, value in _DARK.items()},
}
