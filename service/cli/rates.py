"""What tokens cost a tenant, and what an hour of a device costs you.

Amounts of tokens are given and shown per million, as price lists have them; the books hold them per token.
"""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

import click

from billing import prices, rates, tenants
from service.cli.terminal import ACTOR, Amount, Moment, books, plain, say_next, table

_FROM: Final = "From when on. Default: now, or always where there is none yet."


@click.group()
def price() -> None:
    """What a model costs a tenant."""


@price.command("set")
@click.argument("model")
@click.option("--input", "input_", type=Amount(), required=True, help="Per million prompt tokens.")
@click.option("--output", type=Amount(), required=True, help="Per million completion tokens.")
@click.option("--cached-input", type=Amount(), help="Per million prompt tokens from the cache. Default: as --input.")
@click.option("--request", type=Amount(), default=Decimal(0), help="Per request. Default: 0.")
@click.option("--device-second", type=Amount(), default=Decimal(0), help="Per second of device time. Default: 0.")
@click.option("--tenant", "tenant_name", help="Only for this tenant, before everybody's price.")
@click.option("--from", "start", type=Moment(), help=_FROM)
def price_set(
    *,
    model: str,
    input_: Decimal,
    output: Decimal,
    cached_input: Decimal | None,
    request: Decimal,
    device_second: Decimal,
    tenant_name: str | None,
    start: datetime | None,
) -> None:
    """Append a price. What was charged before stays as it was."""
    with books() as connection:
        amounts = prices.Amounts(
            input=input_.scaleb(-6),
            cached_input=None if cached_input is None else cached_input.scaleb(-6),
            output=output.scaleb(-6),
            request=request,
            device_second=device_second,
        )
        tenant_id = tenants.tenant_id_of(connection, tenant_name) if tenant_name else None
        number, healed = prices.set_price(
            connection, model, amounts, tenant_id=tenant_id, effective_from=start, actor=ACTOR
        )
        made = next(row for row in prices.list_prices(connection) if row.id == number)
        known = prices.is_known(connection, model)
    print(
        f"Price {number} of {model}, for {made.tenant_name or 'every tenant'}, from {_since(made.effective_from)} on: "
        f"{plain(input_)} {made.currency} per million tokens in, {plain(output)} out."
    )
    if healed:
        print(f"{healed} requests without a price got this one.")
    if not known:
        print(f"Nobody has asked for a model named {model} yet: is it one of those that /v1/models lists?")
    say_next("pennyweight price list")


@price.command("list")
def price_list() -> None:
    """List prices, those in force marked with *."""
    with books() as connection:
        found = prices.list_prices(connection)
    head = ("", "MODEL", "TENANT", "INPUT/M", "CACHED/M", "OUTPUT/M", "REQUEST", "DEVICE-S", "CURRENCY", "FROM", "")
    table(
        head,
        [
            (
                "*" if p.in_force else "",
                p.model,
                p.tenant_name or "(all)",
                plain(p.amounts.input.scaleb(6)),
                "as input" if p.amounts.cached_input is None else plain(p.amounts.cached_input.scaleb(6)),
                plain(p.amounts.output.scaleb(6)),
                plain(p.amounts.request),
                plain(p.amounts.device_second),
                p.currency,
                _since(p.effective_from),
                "example" if p.example else "",
            )
            for p in found
        ],
    )
    say_next("pennyweight price set MODEL --input 0.10 --output 0.40")


@click.group("device-rate")
def device_rate() -> None:
    """What an hour of a device costs you."""


@device_rate.command("set")
@click.argument("kind_or_device", metavar="KIND|DEVICE")
@click.option("--hourly", type=Amount(), required=True, help="Per hour.")
@click.option("--from", "start", type=Moment(), help=_FROM)
def device_rate_set(*, kind_or_device: str, hourly: Decimal, start: datetime | None) -> None:
    """Append a rate for a kind of device (such as cpu) or for one device (such as host-a/cpu)."""
    one = "/" in kind_or_device
    with books() as connection:
        number, healed = rates.set_device_rate(
            connection,
            hourly,
            device_kind=None if one else kind_or_device,
            device=kind_or_device if one else None,
            effective_from=start,
            actor=ACTOR,
        )
        made = next(row for row in rates.list_device_rates(connection) if row.id == number)
        devices = rates.list_devices(connection)
    print(
        f"Rate {number} of {kind_or_device}, from {_since(made.effective_from)} on: "
        f"{plain(hourly)} {made.currency} per hour."
    )
    if healed:
        print(f"{healed} requests got a cost by it.")
    if devices and not any(kind_or_device in (device.name, device.kind) for device in devices):
        there = ", ".join(sorted({device.kind for device in devices} | {device.name for device in devices}))
        print(f"No device has worked under that name yet. There are: {there}.")
    say_next("pennyweight device-rate list")


@device_rate.command("list")
def device_rate_list() -> None:
    """List rates, those in force marked with *, and devices that have none."""
    with books() as connection:
        found, devices = rates.list_device_rates(connection), rates.list_devices(connection)
    table(
        ("", "KIND OR DEVICE", "PER HOUR", "CURRENCY", "FROM", ""),
        [
            (
                "*" if r.in_force else "",
                r.device or r.device_kind,
                plain(r.hourly),
                r.currency,
                _since(r.effective_from),
                "example" if r.example else "",
            )
            for r in found
        ],
    )
    for device in devices:
        if device.hourly is None:
            print(f"Device {device.name} has no rate: its requests have no cost.")
    say_next("pennyweight device-rate set KIND --hourly 0.50")


def _since(moment: datetime) -> str:
    return "always" if moment == prices.ALWAYS else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}"
