"""An API in the test's own event loop (real sockets, real uvicorn), keys in a real database, workers of the test's."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import redis
import uvicorn

from billing.database import open_database, transaction
from billing.keys import Scope, create_key
from billing.tenants import Limits, add_tenant
from engine.keys import DATA, PRODUCER, RECORDS, SEQ, committed_key
from engine.protocol import Settlement, unpack_record
from service.app import create_app
from service.protocol import BoundedProtocol
from service.settings import Settings


@pytest.fixture
def settings(database_url: str, redis_url: str, tmp_path: Path) -> Settings:
    environment = {
        "PENNYWEIGHT_DATABASE_URL": database_url,
        "PENNYWEIGHT_REDIS_URL": redis_url,
        "PENNYWEIGHT_HOME": str(tmp_path / "home"),
        "PENNYWEIGHT_LEASE_S": "2",
        "PENNYWEIGHT_REQUEST_TIMEOUT_S": "20",
        "PENNYWEIGHT_FAILOVER_WAIT_S": "8",
        "PENNYWEIGHT_DRAIN_S": "2",
        "PENNYWEIGHT_KEY_CACHE_S": "0.5",
    }
    return Settings.from_environment(environment)


@dataclass(frozen=True)
class Keyring:
    """Tenants and keys made by a test."""

    database_url: str

    def key(self, *, tenant: str = "acme", tenant_limits: Limits | None = None, **limits) -> str:
        with contextlib.closing(_Database(self.database_url)) as database, transaction(database.engine) as connection:
            tenant_id = connection.exec_driver_sql("SELECT id FROM tenants WHERE name = %s", (tenant,)).scalar()
            if tenant_id is None:
                tenant_id = add_tenant(connection, tenant, limits=tenant_limits, actor="test").id
            made = create_key(connection, tenant_id=tenant_id, name="test", limits=Limits(**limits), actor="test")
            return made.secret

    def admin(self) -> str:
        with contextlib.closing(_Database(self.database_url)) as database, transaction(database.engine) as connection:
            return create_key(connection, tenant_id=None, name="ops", scopes=(Scope.ADMIN,), actor="test").secret

    def execute(self, sql: str) -> list:
        with contextlib.closing(_Database(self.database_url)) as database, transaction(database.engine) as connection:
            result = connection.exec_driver_sql(sql)
            return list(result) if result.returns_rows else []


class _Database:
    def __init__(self, url: str) -> None:
        self.engine = open_database(url, pool_size=1)

    def close(self) -> None:
        self.engine.dispose()


@pytest.fixture
def keyring(database_url: str) -> Keyring:
    return Keyring(database_url)


@dataclass
class Api:
    url: str
    port: int
    app: object
    server: uvicorn.Server

    @property
    def dispatch(self):
        return self.app.state.front.dispatch

    def client(self, key: str = "", **more) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=30, **more)

    async def knows(self, model: str = "scripted", cards: int = 1) -> None:
        async with asyncio.timeout(10):
            while not (found := self.dispatch.workers.model(model)) or len(found.cards) != cards:
                await asyncio.sleep(0.02)

    async def idle(self) -> None:
        async with asyncio.timeout(10):
            while self.dispatch.running:
                await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def committed(request) -> Iterator[None]:
    """Stands in for the recorder's last word, so that a producer that closes need not wait for it."""
    if "redis_url" not in request.fixturenames:
        yield
        return
    url, stop = request.getfixturevalue("redis_url"), threading.Event()
    thread = threading.Thread(target=_commit, args=(url, stop))
    thread.start()
    yield
    stop.set()
    thread.join()


def _commit(url: str, stop: threading.Event) -> None:
    last = b"0-0"
    with redis.Redis.from_url(url) as connection:
        while not stop.is_set():
            time.sleep(0.05)
            with contextlib.suppress(redis.RedisError):
                for _, entries in connection.xread({RECORDS: last}):
                    for entry, fields in entries:
                        last = entry
                        connection.rpush(committed_key(fields[PRODUCER].decode()), fields[SEQ])


@contextlib.asynccontextmanager
async def serve(settings: Settings, **changes) -> AsyncIterator[Api]:
    """An API with the changed settings, until the block ends."""
    app = create_app(dataclasses.replace(settings, **changes))
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedProtocol, log_config=None, lifespan="on"))
    server.install_signal_handlers = lambda: None
    task = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    try:
        yield Api(url=f"http://127.0.0.1:{port}", port=port, app=app, server=server)
    finally:
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        server.should_exit = True
        await task
        listening.close()


def settlements(redis_url: str) -> list[Settlement]:
    """Every settlement on the records stream, oldest first."""
    with redis.Redis.from_url(redis_url) as connection:
        records = [unpack_record(fields[DATA]) for _, fields in connection.xrange(RECORDS)]
    return [record for record in records if isinstance(record, Settlement)]


async def settled(redis_url: str, count: int, *, within_s: float = 10) -> list[Settlement]:
    """Wait for ``count`` settlements; there may not be more."""
    async with asyncio.timeout(within_s):
        while len(found := settlements(redis_url)) < count:
            await asyncio.sleep(0.05)
    assert len(found) == count
    return found


def held(redis_url: str) -> dict[str, int]:
    """What is held in Redis: all zero when nothing runs."""
    with redis.Redis.from_url(redis_url) as connection:
        slots = sum(connection.zcard(key) for key in connection.scan_iter("pw:slots:*"))
        load = sum(int(connection.get(key) or 0) for key in connection.scan_iter("pw:load:*"))
        leases = len(list(connection.scan_iter("pw:request:*")))
        return {"slots": slots, "load": load, "requests": connection.zcard("pw:requests"), "leases": leases}


NOTHING = {"slots": 0, "load": 0, "requests": 0, "leases": 0}
