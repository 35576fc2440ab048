"""A database with every table, and builders of records that close by default."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import UUID, uuid4

import psycopg
import pytest
from sqlalchemy import Connection, Engine, text

from billing.database import open_database, transaction
from billing.ids import uuid7, uuid7_floor
from billing.prices import Amounts, set_price
from billing.rates import set_device_rate
from billing.records import Attempt, AttemptSeen, Interval, Origin, Settlement

NOW = datetime.now(UTC).replace(microsecond=0)
TENANT = UUID("0190a000-0000-7000-8000-000000000001")
KEY = UUID("0190a000-0000-7000-8000-000000000002")
MODEL = "smol"
DEVICE, KIND, WORKER = "host-a/cpu", "cpu", "worker-1"
AMOUNTS = Amounts(input=Decimal("1.4e-6"), cached_input=Decimal("0.26e-6"), output=Decimal("4.4e-6"))


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = open_database(database_url)
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def uncommitted(postgres_server, template_database: str) -> Iterator[Engine]:
    """One database for all tests that commit nothing."""
    name = f"uncommitted_{uuid4().hex}"
    with psycopg.connect(postgres_server.url("postgres"), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} TEMPLATE {template_database}")
    engine = open_database(postgres_server.url(name))
    yield engine
    engine.dispose()


@pytest.fixture
def books(uncommitted: Engine) -> Iterator[Connection]:
    """A transaction that the test never commits."""
    with uncommitted.connect() as connection:
        with connection.begin() as never:
            yield connection
            never.rollback()
        assert not connection.scalar(text("SELECT count(*) FROM audit_log")), "the test committed"


@pytest.fixture
def rated(engine: Engine) -> Engine:
    """Committed: a price for MODEL and a rate for KIND."""
    with transaction(engine) as connection:
        set_price(connection, MODEL, AMOUNTS, actor="test")
        set_device_rate(connection, Decimal("0.36"), device_kind=KIND, actor="test")
    return engine


def origin(**changes) -> Origin:
    created_at = changes.pop("created_at", NOW)
    values = {
        "tenant_id": TENANT,
        "api_key_id": KEY,
        "kind": "generate",
        "model": MODEL,
        "route": "",
        "arm": "",
        "deployment": "smol-1",
        "revision": "r1",
        "endpoint": "/v1/completions",
        "stream": False,
        "boot_id": "boot-1",
        "boot_seq": None,
        "batch_id": None,
        "trace_id": "",
        "created_at": created_at,
        "deadline": created_at + timedelta(minutes=10),
    }
    return Origin(**values | changes)


def settlement(request_id: UUID | None = None, **changes) -> Settlement:
    values = {
        "request_id": request_id or uuid7(),
        "origin": origin(),
        "status": "completed",
        "finish_reason": "stop",
        "winning_attempt": 1,
        "attempts": (seen(1),),
        "prompt_tokens": 20,
        "cached_tokens": 0,
        "generated_tokens": 7,
        "delivered_tokens": 7,
        "billed_tokens": 7,
        "queue_ns": 2_000_000,
        "ttft_ns": 50_000_000,
        "tpot_ns": 9_000_001,
        "total_ns": 120_000_000,
        "finished_at": NOW,
    }
    return Settlement(**values | changes)


def seen(attempt: int, **changes) -> AttemptSeen:
    values = {"attempt": attempt, "worker": WORKER, "device": DEVICE, "device_kind": KIND, "device_ns": 5_000_000}
    return AttemptSeen(**values | changes)


def attempt(request_id: UUID, number: int = 1, **changes) -> Attempt:
    values = {
        "request_id": request_id,
        "attempt": number,
        "origin": origin(),
        "worker": WORKER,
        "device": DEVICE,
        "device_kind": KIND,
        "outcome": "completed",
        "prompt_tokens": 20,
        "generated_tokens": 7,
        "received_at": NOW,
        "finished_at": NOW,
        "used_ns": 10_000_000,
        "wasted_ns": {},
        "steps": 8,
        "peak_batch": 1,
        "interval": 1,
    }
    return Attempt(**values | changes)


def interval(number: int, **changes) -> Interval:
    """Ten seconds: 4 busy, 5 idle, 1 overhead."""
    values = {
        "worker": WORKER,
        "device": DEVICE,
        "device_kind": KIND,
        "deployment": "smol-1",
        "number": number,
        "started_at": NOW + timedelta(seconds=10 * (number - 1)),
        "start_ns": 10_000_000_000 * (number - 1),
        "end_ns": 10_000_000_000 * number,
        "busy_ns": 4_000_000_000,
        "idle_ns": 5_000_000_000,
        "overhead_ns": 1_000_000_000,
    }
    return Interval(**values | changes)


def id_at(moment: datetime) -> UUID:
    """A request id made at ``moment``."""
    return UUID(int=uuid7_floor(moment).int | (uuid4().int & ((1 << 62) - 1)))
