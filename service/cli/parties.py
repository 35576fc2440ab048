"""Tenants and their keys."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

import click

from billing import keys, tenants
from service.cli.terminal import ACTOR, Moment, books, say_next, table

_UNLIMITED: Final = "-"
_MOST: Final = (1 << 31) - 1
_WORDS: Final = {
    "--concurrency": "Most requests at once.",
    "--tpm": "Most tokens in any 60 seconds.",
    "--rpm": "Most requests in any 60 seconds.",
}


def _limits(command: click.decorators.FC) -> click.decorators.FC:
    for name, words in _WORDS.items():
        command = click.option(name, type=click.IntRange(1, _MOST), help=f"{words} Default: no limit.")(command)
    return command


def _new_limits(command: click.decorators.FC) -> click.decorators.FC:
    for name, words in _WORDS.items():
        command = click.option(name, type=click.IntRange(0, _MOST), help=f"{words} 0: no limit.")(command)
    return command


@click.group()
def tenant() -> None:
    """Who uses the service."""


@tenant.command("add")
@click.argument("name")
@_limits
@click.option("--weight", type=float, default=1.0, show_default=True, help="Share of a busy device beside others.")
def tenant_add(*, name: str, rpm: int | None, tpm: int | None, concurrency: int | None, weight: float) -> None:
    """Add a tenant."""
    limits = tenants.Limits(rpm=rpm, tpm=tpm, concurrency=concurrency)
    with books() as connection:
        made = tenants.add_tenant(connection, name, limits=limits, weight=weight, actor=ACTOR)
    print(f"Tenant {made.name} is {made.id}.")
    say_next(f"pennyweight key create --tenant {shlex.quote(made.name)}")


@tenant.command("set")
@click.argument("name")
@_new_limits
@click.option("--weight", type=float, help="Share of a busy device beside others.")
def tenant_set(*, name: str, rpm: int | None, tpm: int | None, concurrency: int | None, weight: float | None) -> None:
    """Change a tenant's limits or weight; what is not named stays. It holds within seconds."""
    named = {"rpm": rpm, "tpm": tpm, "concurrency": concurrency}
    limits = {limit: number or None for limit, number in named.items() if number is not None}
    if not limits and weight is None:
        raise click.UsageError("Name what to change: --rpm, --tpm, --concurrency or --weight.")
    with books() as connection:
        changed = tenants.change_tenant(connection, name, limits=limits, weight=weight, actor=ACTOR)
    _show([changed])
    say_next("pennyweight tenant list")


@tenant.command("list")
def tenant_list() -> None:
    """List tenants and their limits."""
    with books() as connection:
        found = tenants.list_tenants(connection)
    _show(found)
    say_next("pennyweight tenant add NAME" if not found else "pennyweight key list")


def _show(found: Iterable[tenants.Tenant]) -> None:
    table(
        ("TENANT", "RPM", "TPM", "CONCURRENCY", "WEIGHT", "KEYS", "ID"),
        [(t.name, *_shown(t.limits), f"{t.weight:g}", t.keys, t.id) for t in found],
    )


@click.group()
def key() -> None:
    """API keys."""


@key.command("create")
@click.option("--tenant", "tenant_name", help="Whose key; see `pennyweight tenant list`.")
@click.option("--admin", is_flag=True, help="The operator's own: administers, calls no models.")
@click.option("--name", default="", help="What the key is for.")
@_limits
@click.option("--expires", type=Moment(), help="When it ends. Default: never.")
def key_create(
    *,
    tenant_name: str | None,
    admin: bool,
    name: str,
    rpm: int | None,
    tpm: int | None,
    concurrency: int | None,
    expires: datetime | None,
) -> None:
    """Create a key and show it, once."""
    if (tenant_name is None) != admin:
        raise click.UsageError("Give either --tenant NAME or --admin.")
    limits = tenants.Limits(rpm=rpm, tpm=tpm, concurrency=concurrency)
    with books() as connection:
        made = keys.create_key(
            connection,
            tenant_id=tenants.tenant_id_of(connection, tenant_name) if tenant_name else None,
            name=name,
            scopes=(keys.Scope.ADMIN,) if admin else (keys.Scope.INFERENCE,),
            limits=limits,
            expires_at=expires,
            actor=ACTOR,
        )
    print(f"{made.secret}\nThis is the only time it is shown.")
    say_next(f"pennyweight key revoke {made.prefix}" if admin else "pennyweight key list")


@key.command("revoke")
@click.argument("prefix", metavar="PREFIX|ID")
def key_revoke(*, prefix: str) -> None:
    """Revoke a key by its visible prefix or its id. It stops working within seconds."""
    with books() as connection:
        revoked = keys.revoke_key(connection, prefix, actor=ACTOR)
    print(f"Key {revoked.prefix}… of {revoked.tenant_name or 'the operator'} is revoked.")
    say_next("pennyweight key list")


@key.command("list")
@click.option("--tenant", "tenant_name", help="Only this tenant's.")
def key_list(*, tenant_name: str | None) -> None:
    """List keys, newest first. Their secrets are not kept."""
    with books() as connection:
        of = tenants.tenant_id_of(connection, tenant_name) if tenant_name else None
        found = keys.list_keys(connection, tenant_id=of)
    table(
        ("KEY", "TENANT", "NAME", "RPM", "TPM", "CONCURRENCY", "STATE", "CREATED", "ID"),
        [
            (
                k.prefix + "…",
                k.tenant_name or "(operator)",
                k.name,
                *_shown(k.limits),
                _state(k),
                _day(k.created_at),
                k.id,
            )
            for k in found
        ],
    )
    say_next("pennyweight key create --tenant NAME")


def _shown(limits: tenants.Limits) -> tuple[str, str, str]:
    rpm, tpm, concurrency = (
        _UNLIMITED if limit is None else str(limit) for limit in (limits.rpm, limits.tpm, limits.concurrency)
    )
    return rpm, tpm, concurrency


def _state(found: keys.ApiKey) -> str:
    if found.revoked_at:
        return f"revoked {_day(found.revoked_at)}"
    if found.expires_at:
        return f"until {_day(found.expires_at)}"
    return "good"


def _day(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d}"
