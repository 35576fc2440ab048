"""Numbers as a reader wants them: short, never a zero that is not one; and exact for tooltips and downloads."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

ABSENT: Final = "–"
_SIGNS: Final = {"USD": "$", "EUR": "€", "GBP": "£"}
_SMALLEST_PLAIN: Final = Decimal("1e-9")
_MINUS: Final = "\N{MINUS SIGN}"
_THIN: Final = "\N{NARROW NO-BREAK SPACE}"
_BIG: Final = ((10**12, "T"), (10**9, "B"), (10**6, "M"))


def money(amount: Decimal | None, currency: str = "USD") -> str:
    """Two decimals from 1 on, three significant digits below: a non-zero amount never reads as zero."""
    if amount is None:
        return ABSENT
    sign = _MINUS if amount < 0 else ""
    return f"{sign}{unit(currency)}{_amount(abs(amount))}"


def unit(currency: str) -> str:
    """What stands before an amount."""
    return _SIGNS.get(currency, f"{currency}{_THIN}")


def exact_money(amount: Decimal | None, currency: str = "USD") -> str:
    """Every digit that the books hold."""
    if amount is None:
        return ABSENT
    digits = format(abs(amount), ",f")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return f"{_MINUS if amount < 0 else ''}{unit(currency)}{digits}"


def _amount(amount: Decimal) -> str:
    rounded = Decimal(f"{amount:.3g}")
    if amount == 0 or rounded >= 1:
        return f"{amount:,.2f}"
    if amount < _SMALLEST_PLAIN:
        return f"{amount:.2e}"
    return f"{rounded:.{2 - rounded.adjusted()}f}"


def count(number: int | None) -> str:
    return ABSENT if number is None else f"{number:,}".replace("-", _MINUS)


def short_count(number: int | None) -> str:
    """Exact up to six digits, then three significant ones: 999,999 and 1.23 M."""
    if number is None:
        return ABSENT
    for size, name in _BIG:
        if abs(number) >= size:
            return f"{_MINUS if number < 0 else ''}{three_digits(abs(number) / size)}{_THIN}{name}"
    return count(number)


def three_digits(value: float) -> str:
    """Of a number that is not negative: 1.30, 13.0, 130 and 1300, never an exponent. Nothing is 0."""
    rounded = Decimal(f"{value:.3g}")
    return f"{rounded:.{max(0, 2 - rounded.adjusted())}f}" if value else "0"


def percent(ratio: Decimal | float | None) -> str:
    """Of a ratio; one decimal, two for a small one, and a tiny one is not nothing."""
    if ratio is None:
        return ABSENT
    value = abs(float(ratio)) * 100
    sign = _MINUS if ratio < 0 else ""
    if 0 < value < 0.01:
        return f"{sign}<0.01%"
    places = 2 if 0 < value < 1 else 1 if value < 1000 else 0
    return f"{sign}{value:,.{places}f}%"


def share(part: Decimal | int, whole: Decimal | int) -> str:
    """``part`` as a percentage of ``whole``; absent where there is no whole."""
    return percent(Decimal(part) / Decimal(whole) if whole else None)


def duration(seconds: Decimal | float | None) -> str:
    """From microseconds to days, with about three digits."""
    if seconds is None:
        return ABSENT
    value = float(seconds)
    if value < 0:
        return _MINUS + duration(-value)
    if value >= 59.95:
        return _clock(round(value))
    if value >= 0.9995 or value == 0:
        return f"{three_digits(value)}{_THIN}s"
    if value >= 0.0009995:
        return f"{three_digits(value * 1e3)}{_THIN}ms"
    return f"{three_digits(value * 1e6)}{_THIN}µs"


def _clock(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,}{_THIN}d {hours}{_THIN}h"
    if hours:
        return f"{hours}{_THIN}h {minutes:02}{_THIN}min"
    return f"{minutes}{_THIN}min {seconds:02}{_THIN}s"


def exact_duration(ns: int) -> str:
    """Every nanosecond."""
    return f"{count(ns)}{_THIN}ns"


def moment(time: datetime | None) -> str:
    """UTC, to the second."""
    return ABSENT if time is None else f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def clock_time(time: datetime, now: datetime) -> str:
    """Short for tables: the time of day, with the day when it is another one (both in UTC)."""
    time, now = time.astimezone(UTC), now.astimezone(UTC)
    return f"{time:%H:%M:%S}" if time.date() == now.date() else f"{time:%d %b %H:%M:%S}"
