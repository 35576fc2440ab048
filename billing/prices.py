"""Prices: appended, effective from a moment on, per model, with a tenant's own before everybody's.

A request is charged at the price in force when it was made and keeps its id. A price never reaches back over one that
was in force, so nothing already charged changes; where none was in force it may, and revalues what was unpriced.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, text

from billing.changes import log_change
from billing.closing import revalue
from billing.moments import bounded
from billing.rating import BOOK_CURRENCY

_NAME_LENGTH: Final = 200
ALWAYS: Final = datetime(2025, 1, 1, tzinfo=UTC)  # before every request these books can hold


class RateError(Exception):
    """A price or rate cannot be set so; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """Per token, per request and per second of device time."""

    input: Decimal
    cached_input: Decimal | None = None  # None: as input
    output: Decimal
    request: Decimal = Decimal(0)
    device_second: Decimal = Decimal(0)

    def __post_init__(self) -> None:
        for amount in asdict(self).values():
            if amount is not None:
                check_amount(amount)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceRow:
    id: int
    model: str
    tenant_name: str | None
    effective_from: datetime
    amounts: Amounts
    currency: str
    example: bool
    in_force: bool


def check_amount(amount: Decimal) -> None:
    """Raises RateError: amounts stay short enough for exact products."""
    exponent = amount.as_tuple().exponent
    if not amount.is_finite() or not 0 <= amount < 1_000_000_000 or not isinstance(exponent, int) or exponent < -18:
        raise RateError(
            f"An amount lies between 0 and a billion and has at most 18 decimals per unit, unlike {amount}."
        )


def check_name(name: str) -> None:
    """Raises RateError: what a price or rate is for has a name that can be shown."""
    if not name.strip() or len(name) > _NAME_LENGTH or not name.isprintable():
        raise RateError(f"A name has 1 to {_NAME_LENGTH} printable characters.")


def set_price(
    connection: Connection,
    model: str,
    amounts: Amounts,
    *,
    tenant_id: UUID | None = None,
    effective_from: datetime | None = None,
    example: bool = False,
    actor: str,
) -> tuple[int, int]:
    """Append a price. Returns its id, and how many unpriced requests got a price by it.

    Raises RateError, and ValueError for a time that can't be kept.

    Without ``effective_from`` it holds from now on, or, where no price is in force, from always.
    """
    now = datetime.now(UTC)
    check_name(model)
    effective_from = effective_from and bounded(effective_from)
    effective_from = effective_from or (now if _in_force(connection, model, tenant_id, now) else ALWAYS)
    if effective_from < now and _in_force(connection, model, tenant_id, now):
        raise RateError("A price cannot reach back over one that is in force. Leave out --from, or give a later time.")
    price_id = connection.scalar(
        text(
            "INSERT INTO prices (model, tenant_id, effective_from, input, cached_input, output, request, device_second,"
            " currency, example) VALUES (:model, :tenant_id, :effective_from, :input, :cached_input, :output, :request,"
            " :device_second, :currency, :example) ON CONFLICT DO NOTHING RETURNING id"
        ),
        {
            "model": model,
            "tenant_id": tenant_id,
            "effective_from": effective_from,
            "currency": BOOK_CURRENCY,
            "example": example,
            **asdict(amounts),
        },
    )
    if price_id is None:
        raise RateError(f"There already is a price from {effective_from:%Y-%m-%d %H:%M:%S}. Give another --from.")
    log_change(
        connection,
        actor,
        "price.set",
        subject=str(price_id),
        model=model,
        tenant=str(tenant_id) if tenant_id else None,
        effective_from=effective_from.isoformat(),
        **{name: None if amount is None else format(amount, "f") for name, amount in asdict(amounts).items()},
    )
    return int(price_id), revalue(connection)


def _in_force(connection: Connection, model: str, tenant_id: UUID | None, now: datetime) -> bool:
    """Whether a request of now would be charged by a price that is already set."""
    found = connection.scalar(
        text(
            "SELECT EXISTS (SELECT FROM prices WHERE model = :model AND effective_from <= :now "
            "AND (tenant_id IS NULL OR tenant_id = :tenant_id))"
        ),
        {"model": model, "tenant_id": tenant_id, "now": now},
    )
    return bool(found)


def is_known(connection: Connection, model: str) -> bool:
    """Whether anybody has used a model of this name, or it was priced as an example when it was put into service."""
    found = connection.scalar(
        text(
            "SELECT EXISTS (SELECT FROM usage_15m WHERE model = :model)"
            " OR EXISTS (SELECT FROM prices WHERE model = :model AND example)"
        ),
        {"model": model},
    )
    return bool(found)


def list_prices(connection: Connection) -> list[PriceRow]:
    """By model and tenant, the newest first."""
    rows = connection.execute(
        text("""
SELECT p.*, t.name AS tenant_name, p.effective_from <= now() AND p.effective_from = max(p.effective_from)
           FILTER (WHERE p.effective_from <= now()) OVER (PARTITION BY p.model, p.tenant_id) AS in_force
FROM prices p LEFT JOIN tenants t ON t.id = p.tenant_id
ORDER BY p.model, t.name NULLS FIRST, p.effective_from DESC
""")
    )
    return [
        PriceRow(
            id=row.id,
            model=row.model,
            tenant_name=row.tenant_name,
            effective_from=row.effective_from,
            amounts=Amounts(
                input=row.input,
                cached_input=row.cached_input,
                output=row.output,
                request=row.request,
                device_second=row.device_second,
            ),
            currency=row.currency,
            example=row.example,
            in_force=bool(row.in_force),
        )
        for row in rows
    ]
