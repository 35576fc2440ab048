"""Device rates: what an hour of a kind of device costs, or of one device before its kind.

Appended and effective from a moment on, like prices, and like them never reaching back over one in force.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

from sqlalchemy import Connection, text

from billing.changes import log_change
from billing.closing import revalue
from billing.lookups import rate_in_force
from billing.moments import bounded
from billing.prices import ALWAYS, RateError, check_amount, check_name
from billing.rating import BOOK_CURRENCY
from billing.rollup import mark_devices_since


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRate:
    id: int
    device_kind: str | None  # one of the two
    device: str | None
    hourly: Decimal
    currency: str
    effective_from: datetime
    example: bool
    in_force: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that a worker has reported, and whether an hour of it has a rate now."""

    name: str
    kind: str
    owned_from: datetime
    owned_to: datetime | None
    hourly: Decimal | None


def set_device_rate(
    connection: Connection,
    hourly: Decimal,
    *,
    device_kind: str | None = None,
    device: str | None = None,
    effective_from: datetime | None = None,
    example: bool = False,
    actor: str,
) -> tuple[int, int]:
    """Append a rate for a kind or for one device. Returns its id, and how many uncosted requests got a cost by it.

    Without ``effective_from`` it holds from now on, or, where no rate is in force, from always. Raises RateError.
    """
    if (device_kind is None) == (device is None):
        raise RateError("Give a kind of device or one device, not both.")
    check_amount(hourly)
    check_name(device_kind or device or "")
    effective_from = effective_from and bounded(effective_from)
    now = datetime.now(UTC)
    in_force = _in_force(connection, device_kind, device, now)
    effective_from = effective_from or (now if in_force else ALWAYS)
    if effective_from < now and in_force:
        raise RateError("A rate cannot reach back over one that is in force. Leave out --from, or give a later time.")
    subject = {"device_kind": device_kind, "device": device}
    rate_id = connection.scalar(
        text(
            "INSERT INTO device_rates (device_kind, device, hourly, currency, effective_from, example) "
            "VALUES (:device_kind, :device, :hourly, :currency, :effective_from, :example) "
            "ON CONFLICT DO NOTHING RETURNING id"
        ),
        {
            **subject,
            "hourly": hourly,
            "currency": BOOK_CURRENCY,
            "effective_from": effective_from,
            "example": example,
        },
    )
    if rate_id is None:
        raise RateError(f"There already is a rate from {effective_from:%Y-%m-%d %H:%M:%S}. Give another --from.")
    log_change(
        connection,
        actor,
        "device-rate.set",
        subject=str(rate_id),
        hourly=format(hourly, "f"),
        effective_from=effective_from.isoformat(),
        **subject,
    )
    healed = revalue(connection)
    mark_devices_since(connection, effective_from)
    return int(rate_id), healed


def _in_force(connection: Connection, device_kind: str | None, device: str | None, now: datetime) -> bool:
    """Whether time of now would be costed by a rate that is already set."""
    found = connection.scalar(
        text(
            "SELECT EXISTS (SELECT FROM device_rates WHERE effective_from <= :now AND (device = :device OR device_kind "
            "= coalesce(CAST(:device_kind AS text), (SELECT kind FROM devices WHERE name = :device))))"
        ),
        {"device_kind": device_kind, "device": device, "now": now},
    )
    return bool(found)


def list_device_rates(connection: Connection) -> list[DeviceRate]:
    """By kind, then by device; the newest first."""
    rows = connection.execute(
        text("""
SELECT *, effective_from <= now() AND effective_from = max(effective_from)
          FILTER (WHERE effective_from <= now()) OVER (PARTITION BY device_kind, device) AS in_force
FROM device_rates ORDER BY device_kind NULLS LAST, device, effective_from DESC
""")
    )
    return [
        DeviceRate(
            id=row.id,
            device_kind=row.device_kind,
            device=row.device,
            hourly=row.hourly,
            currency=row.currency,
            effective_from=row.effective_from,
            example=row.example,
            in_force=bool(row.in_force),
        )
        for row in rows
    ]


def list_devices(connection: Connection) -> list[Device]:
    rows = connection.execute(
        text(f"""
SELECT v.*, rate.hourly
FROM devices v LEFT JOIN LATERAL {rate_in_force("v.name", "v.kind", "now()")} rate ON true
ORDER BY v.name
""")
    )
    return [
        Device(name=row.name, kind=row.kind, owned_from=row.owned_from, owned_to=row.owned_to, hourly=row.hourly)
        for row in rows
    ]
