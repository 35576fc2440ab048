"""Batches through the real tasks process: Postgres, Valkey, Celery, and a worker that does what the test says."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from uuid import UUID

import pytest
import redis

from billing.batches import LineState, claim_lines, find_batch, finish_line, give_back, outputs, start_batch
from billing.contents import Seal, SealError, keep, purge
from billing.database import open_database, transaction
from engine.protocol import Status
from tests.service.conftest import settled, settlements
from tests.service.scripted import ScriptedWorker, ids_of

SECRET = "only-for-tests"


@pytest.fixture
def books(database_url):
    database = open_database(database_url, pool_size=2)
    yield database
    database.dispose()


@pytest.fixture
def environment(database_url, redis_url, tmp_path):
    return os.environ | {
        "PENNYWEIGHT_DATABASE_URL": database_url,
        "PENNYWEIGHT_REDIS_URL": redis_url,
        "PENNYWEIGHT_HOME": str(tmp_path / "home"),
        "PENNYWEIGHT_SECRET": SECRET,
        "PENNYWEIGHT_LEASE_S": "2",
        "PENNYWEIGHT_DRAIN_S": "1",
    }


@contextlib.contextmanager
def tasks(environment, tmp_path):
    """`pennyweight tasks`, running."""
    with (tmp_path / "tasks.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "service.cli", "tasks"], env=environment, stderr=log, stdout=log
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def pennyweight(environment, *words):
    return subprocess.run(
        [sys.executable, "-m", "service.cli", *words], env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


def file_of(tmp_path, count, model="scripted"):
    file = tmp_path / "prompts.jsonl"
    lines = (
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": model, "messages": [{"role": "user", "content": f"hello {number}"}], "max_tokens": 100},
        }
        for number in range(count)
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


async def run_file(environment, keyring, file, *words):
    return await asyncio.to_thread(pennyweight, environment, "batch", "run", str(file), "--key", keyring.key(), *words)


def test_a_file_goes_through_and_only_its_results_show_a_text(environment, keyring, redis_url, tmp_path, books):
    async def scenario():
        async with ScriptedWorker(redis_url, text="Indeed.") as worker:
            with tasks(environment, tmp_path) as process:
                done = await run_file(environment, keyring, file_of(tmp_path, 20))
                found = await settled(redis_url, 20)
                process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(process.wait, 20) == 0
            return done, found, worker.seen

    done, found, jobs = asyncio.run(scenario())
    assert done.returncode == 0, done.stdout + done.stderr
    path = tmp_path / "prompts.output.jsonl"
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.stat().st_mode & 0o777 == 0o600
    assert [result["custom_id"] for result in results] == [f"line-{number}" for number in range(20)]
    assert {result["response"]["body"]["choices"][0]["message"]["content"] for result in results} == {"Indeed."}
    assert {result["response"]["body"]["usage"]["completion_tokens"] for result in results} == {
        len(ids_of("Indeed.")) + 1
    }
    assert {str(record.request_id) for record in found} == {result["response"]["request_id"] for result in results}
    assert {record.status for record in found} == {Status.COMPLETED}
    assert {job.klass for job in jobs} == {"batch"}
    (batch_id,) = {record.origin.batch_id for record in found}
    assert str(batch_id) in done.stdout
    assert "Next: pennyweight report --from 20" in done.stdout.splitlines()[-1]

    with transaction(books) as connection:
        sealed = b"".join(bytes(row.sealed) for row in connection.exec_driver_sql("SELECT sealed FROM contents"))
    for place in (sealed, (tmp_path / "tasks.log").read_bytes(), done.stdout.encode()):
        assert place
        assert b"Indeed" not in place
        assert b"hello" not in place


@pytest.mark.slow
def test_a_killed_tasks_process_leaves_no_line_out_and_charges_none_twice(
    environment, keyring, redis_url, tmp_path, books
):
    async def scenario():
        async with ScriptedWorker(redis_url, text="A rather slow answer.", step_s=0.05):
            with tasks(environment, tmp_path) as process:
                started = await run_file(environment, keyring, file_of(tmp_path, 16), "--no-wait")
                assert started.returncode == 0, started.stderr
                await until(lambda: len(settlements(redis_url)) >= 4)
                process.kill()
            batch_id = UUID(started.stdout.split()[1].rstrip(":"))
            with transaction(books) as connection:  # what 30 seconds would do
                connection.exec_driver_sql("UPDATE batch_lines SET claimed_until = now() WHERE state = 'running'")
            with tasks(environment, tmp_path):
                await until(lambda: finished(books, batch_id), seconds=40)
                with transaction(books) as connection:
                    lines = [json.loads(line) for line in outputs(connection, Seal(SECRET), batch_id)]
                kept = {line["response"]["request_id"] for line in lines}
                await until(lambda: kept <= {str(record.request_id) for record in settlements(redis_url)})
        return lines, kept

    lines, kept = asyncio.run(scenario())
    assert [line["custom_id"] for line in lines] == [f"line-{number}" for number in range(16)]
    assert len(kept) == 16
    records = settlements(redis_url)
    # A line whose output was kept just before the kill is given away.
    assert {str(record.request_id) for record in records if record.status is Status.COMPLETED} <= kept
    assert {record.billed_tokens for record in records if record.status is not Status.COMPLETED} <= {0}


def test_what_runs_at_a_sigterm_is_given_back_and_costs_nothing(environment, keyring, redis_url, tmp_path, books):
    async def scenario():
        async with ScriptedWorker(redis_url, manual=True) as worker:
            with tasks(environment, tmp_path) as process:
                started = await run_file(environment, keyring, file_of(tmp_path, 3), "--no-wait")
                assert started.returncode == 0, started.stderr
                await until(lambda: len(worker.seen) == 3)
                process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(process.wait, 30) == 0

    asyncio.run(scenario())
    with transaction(books) as connection:
        assert {row.state for row in connection.exec_driver_sql("SELECT state FROM batch_lines")} == {"pending"}
    assert {(record.status, record.billed_tokens) for record in settlements(redis_url)} == {(Status.FAILED, 0)}


def test_a_line_that_cannot_be_served_fails_alone_and_says_why(environment, keyring, redis_url, tmp_path):
    file = file_of(tmp_path, 3)
    lines = file.read_text().splitlines()
    lines[1] = lines[1].replace('"max_tokens": 100', '"max_tokens": 100000')
    file.write_text("\n".join(lines))

    async def scenario():
        async with ScriptedWorker(redis_url):
            with tasks(environment, tmp_path):
                return await run_file(environment, keyring, file)

    done = asyncio.run(scenario())
    assert done.returncode == 1
    assert "Lines that failed: 1" in done.stderr
    results = [json.loads(line) for line in (tmp_path / "prompts.output.jsonl").read_text().splitlines()]
    assert [result["response"]["status_code"] for result in results] == [200, 400, 200]
    assert results[1]["response"]["body"]["error"]["code"] == "context_length_exceeded"


def test_an_invalid_file_enqueues_nothing(environment, keyring, redis_url, tmp_path, books):
    file = file_of(tmp_path, 3)
    file.write_text(file.read_text() + "nonsense\n")
    done = pennyweight(environment, "batch", "run", str(file), "--key", keyring.key())
    assert done.returncode == 1
    assert "Line 4: not a JSON object" in done.stderr
    with transaction(books) as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM contents").scalar() == 0
    with redis.Redis.from_url(redis_url) as connection:
        assert connection.keys("pw:celery:tasks") == []


# Claims, without processes.


@pytest.fixture
def batch(keyring, books):
    keyring.key()
    with transaction(books) as connection:
        (key,) = connection.exec_driver_sql("SELECT id, tenant_id FROM api_keys")
        batch_id = start_batch(
            connection, Seal(SECRET), [("a", b"1"), ("b", b"2"), ("c", b"3")], tenant_id=key.tenant_id,
            api_key_id=key.id, model="m", endpoint="/v1/completions",
        )  # fmt: skip
    with transaction(books) as connection:
        return find_batch(connection, batch_id)


def claim(books, batch, by, *, limit=8, lease=timedelta(seconds=30)):
    with transaction(books) as connection:
        return claim_lines(connection, Seal(SECRET), batch.id, by=by, lease=lease, limit=limit)


def finish(books, batch, line, by):
    with transaction(books) as connection:
        return finish_line(connection, Seal(SECRET), batch, line, by=by, state=LineState.DONE, output=by.encode())


def test_two_runners_never_hold_the_same_line(books, batch):
    assert [line.line for line in claim(books, batch, "one", limit=2)] == [1, 2]
    assert [(line.line, line.custom_id, line.body) for line in claim(books, batch, "two")] == [(3, "c", b"3")]
    assert claim(books, batch, "three") == []


def test_of_two_that_believe_they_hold_a_line_one_ends_it(books, batch):
    claim(books, batch, "slow", limit=1, lease=timedelta(seconds=-1))
    assert [line.line for line in claim(books, batch, "quick", limit=1)] == [1]
    assert not finish(books, batch, 1, "slow")
    assert finish(books, batch, 1, "quick")
    assert not finish(books, batch, 1, "quick")
    with transaction(books) as connection:
        assert list(outputs(connection, Seal(SECRET), batch.id)) == [b"quick"]
        assert find_batch(connection, batch.id).open_lines == 2


def test_a_line_given_back_is_anybodys_and_the_last_line_ends_the_batch(books, batch):
    claim(books, batch, "one")
    with transaction(books) as connection:
        give_back(connection, batch.id, 2, by="one")
        give_back(connection, batch.id, 3, by="another")
    assert [line.line for line in claim(books, batch, "two")] == [2]
    assert finish(books, batch, 1, "one")
    assert finish(books, batch, 3, "one")
    assert not finished(books, batch.id)
    assert finish(books, batch, 2, "two")
    assert finished(books, batch.id)


def test_a_sealed_text_opens_only_with_its_secret_id_and_tenant(books, batch):
    with transaction(books) as connection:
        (content,) = keep(connection, Seal(SECRET), [b"text"], tenant_id=batch.tenant_id, expires_at=batch.expires_at)
        row = connection.exec_driver_sql("SELECT * FROM contents WHERE id = %s", (content,)).one()
    assert Seal(SECRET).open(content, batch.tenant_id, row.sealed) == b"text"
    for seal, content_id, tenant_id in (
        (Seal("other"), content, batch.tenant_id),
        (Seal(SECRET), batch.id, batch.tenant_id),
        (Seal(SECRET), content, batch.id),
    ):
        with pytest.raises(SealError):
            seal.open(content_id, tenant_id, row.sealed)
    with pytest.raises(SealError, match="set PENNYWEIGHT_SECRET"):
        Seal("")


def test_expired_texts_go_and_a_line_whose_text_is_gone_is_still_claimed(books, batch):
    with transaction(books) as connection:
        connection.exec_driver_sql("UPDATE contents SET expires_at = now() - interval '1 second'")
        assert purge(connection) == 3
    assert [line.body for line in claim(books, batch, "one")] == [None, None, None]


def finished(books, batch_id):
    with transaction(books) as connection:
        return find_batch(connection, batch_id).finished_at is not None


async def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
