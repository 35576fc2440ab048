"""`pennyweight tasks` while its servers are away: nothing gathers, and it goes on when they are back."""

import os
import secrets
import signal
import subprocess
import sys
import time

import psycopg
import pytest
import redis

from billing.schema import upgrade
from service.home.ports import free_port
from service.home.postgres import Postgres

pytestmark = pytest.mark.slow


@pytest.fixture
def postgres(server_folder, guard):
    server = Postgres(
        server_folder / "postgres-away", secrets.token_hex(8), free_port(),
        log=server_folder / "postgres-away.log", guard=guard, durable=False,
    )  # fmt: skip
    server.start(print)
    yield server
    server.stop()


def dirty(postgres):
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        return connection.execute("SELECT count(*) FROM dirty_buckets").fetchone()[0]


def mark(postgres):
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("INSERT INTO dirty_buckets VALUES ('usage', date_trunc('hour', now()))")


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_postgres_and_redis_go_and_come_back(postgres, redis_url, tmp_path):
    upgrade(postgres.url())
    environment = os.environ | {
        "PENNYWEIGHT_DATABASE_URL": postgres.url(),
        "PENNYWEIGHT_REDIS_URL": redis_url,
        "PENNYWEIGHT_HOME": str(tmp_path),
        "PENNYWEIGHT_SECRET": "only-for-tests",
    }
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", "service.cli", "tasks"]
        process = subprocess.Popen(command, env=environment, stderr=log, stdout=log)
    try:
        with redis.Redis.from_url(redis_url) as connection:
            mark(postgres)
            until(lambda: dirty(postgres) == 0)

            postgres.stop()
            until(lambda: b"DatabaseUnavailable" in (tmp_path / "log").read_bytes())
            time.sleep(6)
            assert connection.llen("pw:celery:tasks") <= 5, "at most one message of each chore waits"
            postgres.start(print)
            mark(postgres)
            until(lambda: dirty(postgres) == 0)

            connection.flushall()
            mark(postgres)
            until(lambda: dirty(postgres) == 0, seconds=30)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        assert b"Traceback" not in (tmp_path / "log").read_bytes()
    finally:
        process.kill()
        process.wait()
