"""What a new system starts with: a tenant, its key, the operator's key, and an example of a price and of a device rate.

Every function may run any number of times and at once in several processes: what is there is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from sqlalchemy import Connection, text

from billing.database import Turn, take_turn
from billing.keys import Scope, authenticate, create_key
from billing.prices import Amounts, set_price
from billing.rates import set_device_rate
from billing.tenants import TenantError, add_tenant, tenant_id_of

FIRST_TENANT: Final = "default"
_ACTOR: Final = "bootstrap"
_PER_MILLION: Final = Decimal("1e-6")
_EXAMPLE_PRICE: Final = Amounts(
    input=Decimal("0.10") * _PER_MILLION,
    cached_input=Decimal("0.05") * _PER_MILLION,
    output=Decimal("0.40") * _PER_MILLION,
)
_EXAMPLE_CPU_HOURLY: Final = Decimal("0.08")
_EXAMPLE_GPU_HOURLY: Final = Decimal("2.50")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstKeys:
    """The two secrets: shown to whoever runs the system, and nowhere else."""

    api_key: str
    admin_key: str


def first_keys(connection: Connection, held: FirstKeys | None = None) -> FirstKeys:
    """The keys to start with: ``held`` if this database knows them (revoked ones too), else new ones.

    New ones belong to the tenant FIRST_TENANT, which is made when it isn't there. Keep them before the transaction
    commits: then a crash in between leaves either keys that work, or none in the database.
    """
    take_turn(connection, Turn.BOOTSTRAP)
    if held and authenticate(connection, held.api_key) and authenticate(connection, held.admin_key):
        return held
    try:
        tenant_id = tenant_id_of(connection, FIRST_TENANT)
    except TenantError:
        tenant_id = add_tenant(connection, FIRST_TENANT, actor=_ACTOR).id
    api_key = create_key(connection, tenant_id=tenant_id, name="first key", actor=_ACTOR)
    admin_key = create_key(connection, tenant_id=None, name="operator", scopes=(Scope.ADMIN,), actor=_ACTOR)
    return FirstKeys(api_key=api_key.secret, admin_key=admin_key.secret)


def has_keys(connection: Connection) -> bool:
    """Whether anybody made keys yet; until this transaction ends nobody else makes the first."""
    take_turn(connection, Turn.BOOTSTRAP)
    return bool(connection.scalar(text("SELECT EXISTS (SELECT FROM api_keys)")))


def example_price(connection: Connection, model: str) -> bool:
    """Give ``model`` an example price if it never had any. True when it did so."""
    take_turn(connection, Turn.BOOTSTRAP)
    if connection.scalar(text("SELECT EXISTS (SELECT FROM prices WHERE model = :model)"), {"model": model}):
        return False
    set_price(connection, model, _EXAMPLE_PRICE, example=True, actor=_ACTOR)
    return True


def example_device_rate(connection: Connection, device_kind: str) -> bool:
    """Give this kind of device an example rate if it never had any. True when it did so."""
    take_turn(connection, Turn.BOOTSTRAP)
    known = text("SELECT EXISTS (SELECT FROM device_rates WHERE device_kind = :kind)")
    if connection.scalar(known, {"kind": device_kind}):
        return False
    hourly = _EXAMPLE_CPU_HOURLY if device_kind == "cpu" else _EXAMPLE_GPU_HOURLY
    set_device_rate(connection, hourly, device_kind=device_kind, example=True, actor=_ACTOR)
    return True
