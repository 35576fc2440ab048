"""The arithmetic of money: what a request is charged, what device time costs, how a sum is shared out.

Pure functions on Decimal. A price is exact and never rounded; a cost is rounded once, half-even, to 18 places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import (
    ROUND_FLOOR,
    ROUND_HALF_EVEN,
    Context,
    Decimal,
    DivisionByZero,
    Inexact,
    InvalidOperation,
    localcontext,
)
from functools import reduce
from typing import Final

BOOK_CURRENCY: Final = "USD"
COST_UNIT: Final = Decimal("1e-18")
NS_PER_HOUR: Final = 3_600_000_000_000

_TRAPS: Final = [InvalidOperation, DivisionByZero]
_EXACT: Final = Context(prec=200, traps=[*_TRAPS, Inexact])
# Wide enough that a quotient which is not exactly half a unit cannot look like it.
_WIDE: Final = Context(prec=200, rounding=ROUND_HALF_EVEN, traps=_TRAPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a model costs a tenant: amounts per token, per request and per second of device time used."""

    id: int
    input: Decimal
    cached_input: Decimal | None  # None: as input
    output: Decimal
    request: Decimal
    device_second: Decimal
    currency: str


def price_of(price: Price, *, prompt: int, cached: int, completion: int, device_ns: int) -> Decimal:
    """Uncached · input + cached · cached_input + completion · output + request + device seconds · device_second."""
    cached_input = price.input if price.cached_input is None else price.cached_input
    with localcontext(_EXACT):
        return (
            (prompt - cached) * price.input
            + cached * cached_input
            + completion * price.output
            + price.request
            + seconds(device_ns) * price.device_second
        )


def cost_of(device_ns: int, hourly: Decimal) -> Decimal:
    """``device_ns`` nanoseconds of a device that costs ``hourly``."""
    with localcontext(_WIDE):
        return per_hour(device_ns * hourly)


def per_hour(product: Decimal) -> Decimal:
    """The cost of a product of nanoseconds and hourly rates, or of a sum of such."""
    with localcontext(_WIDE):
        return (product / NS_PER_HOUR).quantize(COST_UNIT)


def seconds(ns: int) -> Decimal:
    return Decimal(ns).scaleb(-9, _EXACT)


def add(amounts: Iterable[Decimal]) -> Decimal:
    """Their exact sum; the default context would round what is longer than 28 digits."""
    return reduce(_EXACT.add, amounts, Decimal(0))


def subtract(amount: Decimal, less: Decimal) -> Decimal:
    return _EXACT.subtract(amount, less)


def share_out(total: Decimal, weights: Sequence[Decimal]) -> list[Decimal]:
    """Split ``total`` in proportion to ``weights`` into parts that sum to it exactly, by largest remainder.

    ``total`` must be a multiple of COST_UNIT, and some weight positive.
    """
    with localcontext(_WIDE):
        whole = sum(weights, Decimal(0))
        ideal = [total * weight / whole for weight in weights]
        parts = [part.quantize(COST_UNIT, ROUND_FLOOR) for part in ideal]
        left = int((total - sum(parts, Decimal(0))) / COST_UNIT)
        neediest = sorted(range(len(parts)), key=lambda n: parts[n] - ideal[n])
        for n in neediest[:left]:
            parts[n] += COST_UNIT
    return parts
