"""Price and cost of requests, computed from what is in the books, whenever something they follow from came in.

A request is closed from its own row, its attempts, the price in force when it was made and the rate in force when its
serving attempt ended. Closing again gives the same unless one of these is new, so order and repetition do not matter.

* price: 0 for a failed request; NULL while no price is in force (``price_id`` is NULL: unpriced) and, if the price
  charges device time, until the serving attempt is reported.
* cost: the serving attempt's used time at its device's rate. NULL until it is reported (``pending``) and while the
  device has no rate (uncosted).
* every other nanosecond, of this attempt or another, is waste: beside the cost, never in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, Row, text

from billing.database import Turn, take_turn
from billing.lookups import PRICE_ORDER, price_in_force, rate_in_force
from billing.rating import Price, cost_of, price_of, seconds
from billing.records import FAILED
from billing.rollup import mark_usage

_AT_ONCE: Final = 1000

# One row per request. A price once taken stays: it is looked for only while there is none.
_FACTS: Final = text(f"""
SELECT r.id, r.model, r.status, r.prompt_tokens, r.cached_tokens, r.completion_tokens, r.finished_at,
       r.serving_attempt IS NOT NULL AND served.attempt IS NULL AS pending,
       coalesce(served.used_ns, 0) AS served_ns,
       coalesce(every.total_ns, 0) AS total_ns,
       greatest(r.attempts, every.attempts) AS attempts,
       price.id AS price_id, price.input, price.cached_input, price.output, price.request, price.device_second,
       price.currency, served.device_kind, rate.hourly
FROM requests r
LEFT JOIN attempts served ON served.request_id = r.id AND served.attempt = r.serving_attempt
CROSS JOIN LATERAL (
    SELECT count(*) AS attempts, sum(used_ns + wasted_ns) AS total_ns FROM attempts WHERE request_id = r.id
) every
LEFT JOIN LATERAL (
    SELECT p.* FROM prices p
    WHERE CASE WHEN r.price_id IS NULL THEN {price_in_force("r.model", "r.tenant_id", "r.created_at")}
          ELSE p.id = r.price_id END
    ORDER BY {PRICE_ORDER} LIMIT 1
) price ON true
LEFT JOIN LATERAL {rate_in_force("served.device", "served.device_kind", "served.finished_at")} rate ON true
WHERE r.id = ANY(:ids)
""")

_CLOSE: Final = text("""
UPDATE requests r
SET device_seconds = v.device_seconds, waste_seconds = v.waste_seconds, attempts = v.attempts, pending = v.pending,
    price = v.price, price_id = v.price_id, currency = v.currency, cost = v.cost
FROM unnest(CAST(:id AS uuid[]), CAST(:device_seconds AS numeric[]), CAST(:waste_seconds AS numeric[]),
            CAST(:attempts AS int[]), CAST(:pending AS boolean[]), CAST(:price AS numeric[]),
            CAST(:price_id AS bigint[]), CAST(:currency AS text[]), CAST(:cost AS numeric[]))
     AS v(id, device_seconds, waste_seconds, attempts, pending, price, price_id, currency, cost)
WHERE r.id = v.id AND r.id = ANY(:id)
""")

_OPEN: Final = text("""
SELECT id FROM requests WHERE (price IS NULL OR cost IS NULL) AND NOT pending AND id > :after ORDER BY id LIMIT :limit
""")


@dataclass(frozen=True, slots=True)
class Closed:
    ids: frozenset[UUID]  # those that have a row
    unpriced: dict[UUID, str]  # and the model that has no price
    uncosted: dict[UUID, str]  # and the kind of device that has no rate


@dataclass(frozen=True, slots=True, kw_only=True)
class _Closing:
    """The computed columns of one row."""

    id: UUID
    device_seconds: Decimal
    waste_seconds: Decimal
    attempts: int
    pending: bool
    price: Decimal | None
    price_id: int | None
    currency: str | None
    cost: Decimal | None

    @property
    def unpriced(self) -> bool:
        return self.price is None and self.price_id is None

    @property
    def uncosted(self) -> bool:
        return self.cost is None and not self.pending


def close(connection: Connection, ids: Iterable[UUID]) -> Closed:
    """Compute price, cost and times of the requests among ``ids`` that have a row. The caller has Turn.RECORDING."""
    wanted = list(ids)
    facts = connection.execute(_FACTS, {"ids": wanted}).all() if wanted else []
    if not facts:
        return Closed(frozenset(), {}, {})
    closings = [_closing(row) for row in facts]
    connection.execute(_CLOSE, {name: [getattr(c, name) for c in closings] for name in _Closing.__slots__})
    mark_usage(connection, _moments(facts))
    return Closed(
        frozenset(c.id for c in closings),
        unpriced={c.id: f.model for c, f in zip(closings, facts, strict=True) if c.unpriced},
        uncosted={c.id: f.device_kind for c, f in zip(closings, facts, strict=True) if c.uncosted},
    )


def revalue(connection: Connection) -> int:
    """Close again what had no price or no rate, after one was set. Returns how many now have both."""
    take_turn(connection, Turn.RECORDING)
    after, healed = UUID(int=0), 0
    while ids := list(connection.scalars(_OPEN, {"after": after, "limit": _AT_ONCE})):
        after = ids[-1]
        closed = close(connection, ids)
        healed += len(closed.ids - closed.unpriced.keys() - closed.uncosted.keys())
    return healed


def _moments(facts: Iterable[Row[tuple[object, ...]]]) -> Iterator[datetime]:
    return (row.finished_at for row in facts)


def _closing(row: Row[tuple[object, ...]]) -> _Closing:
    price = _price(row)
    return _Closing(
        id=row.id,
        device_seconds=seconds(row.served_ns),
        waste_seconds=seconds(int(row.total_ns) - row.served_ns),
        attempts=row.attempts,
        pending=row.pending,
        price=_charge(row, price),
        price_id=price.id if price else None,
        currency=price.currency if price else None,
        cost=_cost(row),
    )


def _price(row: Row[tuple[object, ...]]) -> Price | None:
    if row.price_id is None or row.status == FAILED:
        return None
    return Price(
        id=row.price_id,
        input=row.input,
        cached_input=row.cached_input,
        output=row.output,
        request=row.request,
        device_second=row.device_second,
        currency=row.currency,
    )


def _charge(row: Row[tuple[object, ...]], price: Price | None) -> Decimal | None:
    if row.status == FAILED:
        return Decimal(0)
    if price is None or (row.pending and price.device_second):
        return None
    return price_of(
        price,
        prompt=row.prompt_tokens,
        cached=row.cached_tokens,
        completion=row.completion_tokens,
        device_ns=row.served_ns,
    )


def _cost(row: Row[tuple[object, ...]]) -> Decimal | None:
    if row.pending:
        return None
    if row.served_ns == 0:
        return Decimal(0)
    return None if row.hourly is None else cost_of(row.served_ns, row.hourly)
