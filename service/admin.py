"""The operator's API: tenants and keys, behind a key with the scope ``admin``. Every change is in the audit log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Final, TypeVar
from uuid import UUID

import msgspec
from litestar import Router, get, post
from litestar.handlers import BaseRouteHandler
from litestar.openapi import ResponseSpec
from litestar.params import FromPath, JSONBody
from msgspec import Meta
from sqlalchemy import Connection as Database

from billing import keys, tenants
from billing.database import DatabaseUnavailable, transaction
from billing.keys import Scope
from service.front import Connection, Front, principal_of
from service.inference import HttpRequest, authenticate
from service.wire import errors

_T = TypeVar("_T")
_Limit = Annotated[int, Meta(ge=1, lt=1 << 31)] | None
_ERRORS: Final = {
    status: ResponseSpec(errors.ErrorBody, generate_examples=False, description="OpenAI's error body")
    for status in (400, 401, 403, 404, 503)
}


class LimitsBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """null is unlimited."""

    rpm: _Limit = None
    tpm: _Limit = None
    concurrency: _Limit = None

    def limits(self) -> tenants.Limits:
        return tenants.Limits(rpm=self.rpm, tpm=self.tpm, concurrency=self.concurrency)


class TenantCreation(LimitsBody, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=100)]
    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0


class KeyCreation(LimitsBody, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=100)]
    expires_at: Annotated[datetime, Meta(tz=True)] | None = None


class TenantObject(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    name: str
    weight: float
    rpm: int | None
    tpm: int | None
    concurrency: int | None
    keys: int  # that can still be used


class KeyObject(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    name: str
    prefix: str
    scopes: list[str]
    rpm: int | None
    tpm: int | None
    concurrency: int | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class NewKeyObject(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    prefix: str
    secret: str  # shown once, here


class TenantList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[TenantObject]


class KeyList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[KeyObject]


def routes(front: Front) -> Router:
    async def needs_admin(connection: Connection, _: BaseRouteHandler) -> None:
        await authenticate(front, connection, Scope.ADMIN)

    async def books(work: Callable[[Database], _T]) -> _T:
        return await asyncio.to_thread(_in_transaction, front, work)

    @get("/tenants", summary="List tenants", responses=_ERRORS)
    async def list_tenants() -> TenantList:
        return TenantList(data=[_tenant(tenant) for tenant in await books(tenants.list_tenants)])

    @post("/tenants", summary="Create a tenant", responses=_ERRORS)
    async def create_tenant(data: JSONBody[TenantCreation], request: HttpRequest) -> TenantObject:
        actor = _actor(request)
        limits = data.limits()
        return _tenant(
            await books(lambda db: tenants.add_tenant(db, data.name, limits=limits, weight=data.weight, actor=actor))
        )

    @get("/tenants/{tenant_id:uuid}/keys", summary="List a tenant's keys", responses=_ERRORS)
    async def list_keys(tenant_id: FromPath[UUID]) -> KeyList:
        return KeyList(data=[_key(key) for key in await books(lambda db: _keys_of(db, tenant_id))])

    @post("/tenants/{tenant_id:uuid}/keys", summary="Create a key; its secret is shown once", responses=_ERRORS)
    async def create_key(tenant_id: FromPath[UUID], data: JSONBody[KeyCreation], request: HttpRequest) -> NewKeyObject:
        actor = _actor(request)
        key = await books(lambda db: _create_key(db, tenant_id, data, actor))
        return NewKeyObject(id=key.id, prefix=key.prefix, secret=key.secret)

    @post("/keys/{key_id:uuid}/revoke", status_code=200, summary="Revoke a key", responses=_ERRORS)
    async def revoke_key(key_id: FromPath[UUID], request: HttpRequest) -> KeyObject:
        actor = _actor(request)
        await books(lambda db: keys.revoke_key(db, str(key_id), actor=actor))
        return _key(await books(lambda db: next(key for key in keys.list_keys(db) if key.id == key_id)))

    handlers = [list_tenants, create_tenant, list_keys, create_key, revoke_key]
    return Router("/admin", route_handlers=handlers, guards=[needs_admin], tags=["Admin"])


def _in_transaction(front: Front, work: Callable[[Database], _T]) -> _T:
    try:
        with transaction(front.database) as connection:
            return work(connection)
    except DatabaseUnavailable:
        raise errors.unavailable("The database does not answer. Please retry later.", "database_unavailable") from None
    except (tenants.TenantError, ValueError) as error:
        raise errors.invalid(str(error)) from None
    except keys.UnknownKeyError:
        raise _not_found("key") from None


def _keys_of(connection: Database, tenant_id: UUID) -> list[keys.ApiKey]:
    _must_exist(connection, tenant_id)
    return keys.list_keys(connection, tenant_id=tenant_id)


def _create_key(connection: Database, tenant_id: UUID, data: KeyCreation, actor: str) -> keys.NewKey:
    _must_exist(connection, tenant_id)
    return keys.create_key(
        connection,
        tenant_id=tenant_id,
        name=data.name,
        limits=data.limits(),
        expires_at=data.expires_at,
        actor=actor,
    )


def _must_exist(connection: Database, tenant_id: UUID) -> None:
    try:
        tenants.tenant_id_of(connection, str(tenant_id))
    except tenants.TenantError:
        raise _not_found("tenant") from None


def _not_found(what: str) -> errors.ApiError:
    return errors.ApiError(404, f"There is no such {what}.", type="invalid_request_error", code=f"{what}_not_found")


def _actor(request: HttpRequest) -> str:
    principal = principal_of(request.scope)
    assert principal is not None
    return principal.prefix


def _tenant(tenant: tenants.Tenant) -> TenantObject:
    limits = tenant.limits
    return TenantObject(
        id=tenant.id,
        name=tenant.name,
        weight=tenant.weight,
        rpm=limits.rpm,
        tpm=limits.tpm,
        concurrency=limits.concurrency,
        keys=tenant.keys,
    )


def _key(key: keys.ApiKey) -> KeyObject:
    return KeyObject(
        id=key.id,
        name=key.name,
        prefix=key.prefix,
        scopes=list(key.scopes),
        rpm=key.limits.rpm,
        tpm=key.limits.tpm,
        concurrency=key.limits.concurrency,
        created_at=key.created_at,
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
    )
