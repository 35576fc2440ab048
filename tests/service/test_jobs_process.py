"""`pennyweight tasks` as it runs: processes of its own, a database that owes sums, a killed leader, Postgres away."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
import redis

from billing.contents import Seal, keep
from billing.database import open_database, transaction
from billing.ids import uuid7
from billing.recording import record
from billing.sweeping import OWNER_LOST
from service.beat import LEAD_KEY
from tests.billing.conftest import attempt, id_at, origin, settlement

QUEUE = "pw:celery:tasks"
PROMISED_S = 15  # from a recorded request to its sums
CHORES = 5


class Tasks:
    """One `pennyweight tasks` and what it logged."""

    def __init__(self, environment, log):
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "service.cli", "tasks"], env=environment, stdout=subprocess.DEVNULL, stderr=file
            )

    def logged(self, event):
        lines = (line for line in self._log.read_text().splitlines(keepends=True) if line.endswith("\n"))
        return [entry for entry in map(json.loads, lines) if entry["event"] == event]

    def leads(self):
        return len(self.logged("beat leads")) > len(self.logged("beat no longer leads"))

    def lives(self):
        return self._process.poll() is None

    def kill(self):
        self._process.kill()
        self._process.wait()

    def terminate(self):
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=30)


@pytest.fixture
def books(database_url):
    database = open_database(database_url, pool_size=2)
    yield database
    database.dispose()


@pytest.fixture
def start(database_url, redis_url, tmp_path):
    """Starts `pennyweight tasks`; all are gone after the test."""
    environment = os.environ | {
        "PENNYWEIGHT_DATABASE_URL": database_url,
        "PENNYWEIGHT_REDIS_URL": redis_url,
        "PENNYWEIGHT_HOME": str(tmp_path / "home"),
        "PENNYWEIGHT_SECRET": "only-for-tests",
        "PENNYWEIGHT_DRAIN_S": "1",
    }
    with contextlib.ExitStack() as running:

        def start(name):
            tasks = Tasks(environment, tmp_path / f"{name}.log")
            running.callback(tasks.kill)
            return tasks

        yield start


def finish_a_request(books):
    request_id = uuid7()
    with transaction(books) as connection:
        record(connection, settlements=[settlement(request_id)], attempts=[attempt(request_id)])


def counted(books):
    with transaction(books) as connection:
        return connection.exec_driver_sql("SELECT coalesce(sum(requests), 0) FROM usage_15m").scalar_one()


@pytest.mark.slow
def test_of_two_processes_one_leads_and_after_its_death_the_other_keeps_the_sums_right(start, books, redis_url):
    first, second = start("first"), start("second")
    until(lambda: first.leads() or second.leads())
    finish_a_request(books)
    until(lambda: counted(books) == 1, seconds=PROMISED_S)
    leader, other = (first, second) if first.leads() else (second, first)
    assert not other.leads()

    leader.kill()
    finish_a_request(books)
    until(lambda: counted(books) == 2)
    assert other.leads()
    assert other.terminate() == 0
    with redis.Redis.from_url(redis_url) as connection:
        assert connection.get(LEAD_KEY) is None, "the lead is given up, not left to lapse"


def test_everything_that_is_due_is_done_at_the_start_and_logged_once(start, books):
    long_ago = datetime.now(UTC) - timedelta(days=1)
    with transaction(books) as connection:
        lost = id_at(long_ago)
        record(connection, attempts=[attempt(lost, origin=origin(created_at=long_ago))])
        connection.exec_driver_sql("UPDATE awaiting_settlement SET recorded_at = now() - interval '1 day'")
        tenant_id = connection.exec_driver_sql(
            "INSERT INTO tenants (id, name) VALUES (gen_random_uuid(), 'acme') RETURNING id"
        ).scalar_one()
        keep(connection, Seal("s"), [b"text"], tenant_id=tenant_id, expires_at=long_ago)
        partition = connection.exec_driver_sql(
            "SELECT max(inhrelid::regclass::text) FROM pg_inherits WHERE inhparent = 'requests'::regclass"
        ).scalar_one()
        connection.exec_driver_sql(f"DROP TABLE {partition}")
    tasks = start("tasks")

    def look(sql):
        with transaction(books) as connection:
            return connection.exec_driver_sql(sql).scalar()

    until(lambda: look("SELECT error_code FROM requests") == OWNER_LOST)
    until(lambda: look("SELECT count(*) FROM contents") == 0)
    until(lambda: look(f"SELECT to_regclass('{partition}')") is not None)
    until(lambda: counted(books) == 1, seconds=PROMISED_S)
    assert tasks.terminate() == 0
    assert {line["task"]: line["count"] for line in tasks.logged("task done") if line["task"] != "rollup"} == {
        "sweep": 1, "purge": 1, "partitions": 1,
    }  # fmt: skip


@pytest.mark.slow
def test_while_postgres_is_away_nothing_piles_up_and_afterwards_the_work_goes_on(
    start, books, database_url, postgres_server, redis_url
):
    tasks = start("tasks")
    until(tasks.leads)
    with postgres_away(postgres_server, database_url), redis.Redis.from_url(redis_url) as connection:
        until(lambda: len(tasks.logged("task failed")) >= 4)
        assert connection.llen(QUEUE) <= CHORES
        assert tasks.lives()
    finish_a_request(books)
    until(lambda: counted(books) == 1)
    assert tasks.terminate() == 0


@contextlib.contextmanager
def postgres_away(server, database_url):
    """For one database: nobody gets in, and who is in is thrown out."""
    name = database_url.rpartition("/")[2]
    with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
        yield
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")


def until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
