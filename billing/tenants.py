"""Tenants: who is served, within which limits, and with which weight when the device is short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, text

from billing.changes import log_change
from billing.ids import uuid7

_NAME_LENGTH: Final = 100


class TenantError(Exception):
    """A tenant cannot be made or found; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """None is unlimited."""

    rpm: int | None = None  # requests in any 60 seconds
    tpm: int | None = None  # tokens in any 60 seconds
    concurrency: int | None = None  # requests at once

    def __post_init__(self) -> None:
        if any(limit is not None and not 0 < limit < 1 << 31 for limit in asdict(self).values()):
            raise ValueError("a limit is a positive number below 2,147,483,648")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    id: UUID
    name: str
    limits: Limits
    weight: float
    keys: int  # that can still be used


def add_tenant(
    connection: Connection, name: str, *, limits: Limits | None = None, weight: float = 1.0, actor: str
) -> Tenant:
    """Raises TenantError if the name is taken or none, ValueError for a weight out of range."""
    name = name.strip()
    if not name or len(name) > _NAME_LENGTH or not name.isprintable():
        raise TenantError(f"A tenant's name has 1 to {_NAME_LENGTH} printable characters.")
    weight, limits = _checked(weight), limits or Limits()
    tenant_id = connection.scalar(
        text(
            "INSERT INTO tenants (id, name, rpm, tpm, concurrency, weight) "
            "VALUES (:id, :name, :rpm, :tpm, :concurrency, :weight) ON CONFLICT (name) DO NOTHING RETURNING id"
        ),
        {"id": uuid7(), "name": name, "weight": weight, **asdict(limits)},
    )
    if tenant_id is None:
        raise TenantError(f"There already is a tenant named {name!r}. `pennyweight tenant list` shows all.")
    log_change(connection, actor, "tenant.add", subject=str(tenant_id), name=name, weight=weight, **asdict(limits))
    return Tenant(id=tenant_id, name=name, limits=limits, weight=weight, keys=0)


def change_tenant(
    connection: Connection, name: str, *, limits: Mapping[str, int | None], weight: float | None = None, actor: str
) -> Tenant:
    """Change what is named of rpm, tpm and concurrency (None: no limit), and the weight. Raises as ``add_tenant``."""
    tenant_id = tenant_id_of(connection, name)
    before = next(tenant for tenant in list_tenants(connection) if tenant.id == tenant_id)
    after = replace(
        before, limits=replace(before.limits, **limits), weight=_checked(before.weight if weight is None else weight)
    )
    row = {**asdict(after.limits), "weight": after.weight}
    connection.execute(
        text("UPDATE tenants SET rpm = :rpm, tpm = :tpm, concurrency = :concurrency, weight = :weight WHERE id = :id"),
        {"id": tenant_id, **row},
    )
    log_change(connection, actor, "tenant.set", subject=str(tenant_id), **row)
    return after


def _checked(weight: float) -> float:
    if not 0.001 <= weight <= 1000:
        raise ValueError("A weight lies between 0.001 and 1000; 1 is everybody's.")
    return weight


def list_tenants(connection: Connection) -> list[Tenant]:
    rows = connection.execute(
        text(
            "SELECT t.id, t.name, t.rpm, t.tpm, t.concurrency, t.weight, (SELECT count(*) FROM api_keys k "
            "WHERE k.tenant_id = t.id AND k.revoked_at IS NULL AND coalesce(k.expires_at > now(), true)) AS keys "
            "FROM tenants t ORDER BY t.name"
        )
    )
    return [
        Tenant(
            id=row.id,
            name=row.name,
            limits=Limits(rpm=row.rpm, tpm=row.tpm, concurrency=row.concurrency),
            weight=row.weight,
            keys=row.keys,
        )
        for row in rows
    ]


def tenant_id_of(connection: Connection, name: str) -> UUID:
    """The tenant called ``name``, or with that id. Raises TenantError."""
    found: UUID | None = connection.scalar(
        text("SELECT id FROM tenants WHERE name = :name OR CAST(id AS text) = lower(:name)"), {"name": name}
    )
    if found is None:
        raise TenantError(f"There is no tenant {name!r}. `pennyweight tenant list` shows all.")
    return found
