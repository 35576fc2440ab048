"""A disk that fills up while requests run: it refuses new ones, and what was delivered is charged."""

import asyncio
import shutil
from collections import Counter

import pytest
import structlog

from engine.adoption import adopt
from engine.protocol import FinishReason, Status, unpack_record
from tests.full_disk import full_disk
from tests.service.conftest import NOTHING, held, serve, settled
from tests.service.scripted import END, MODEL, ScriptedWorker, ids_of

PATH = "/v1/completions"
BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 6}


@pytest.fixture(autouse=True)
def _no_log_is_printed():
    with structlog.testing.capture_logs():  # the test's output is on the full disk too
        yield


def test_a_full_disk_refuses_requests_and_loses_no_settlement(settings, keyring, redis_url, tmp_path):
    key = keyring.key(concurrency=200)

    async def main():
        async with (
            ScriptedWorker(redis_url, manual=True) as worker,
            serve(settings) as api,
            api.client(key) as client,
        ):
            await api.knows()
            with full_disk(1 << 16):
                asked = [asyncio.create_task(client.post(PATH, json=BODY)) for _ in range(60)]
                await until_refused_or_running(asked, worker)
                await answer_all(asked, worker)
                answers = Counter([(await task).status_code for task in asked])
                assert answers.keys() == {200, 503}
                running = answers[200]
                shutil.copytree(settings.spool, tmp_path / "killed")
                records = await settled(redis_url, running)
            assert {(r.status, r.billed_tokens) for r in records} == {(Status.COMPLETED, 6)}
            assert held(redis_url) == NOTHING
            kept = adopted(tmp_path / "killed")
            assert {(r.status, r.billed_tokens) for r in kept} == {(Status.COMPLETED, 6)}
            assert len(kept) == running
            assert sorted(r.origin.boot_seq for r in kept) == list(range(1, running + 1))
            while not worker.jobs.empty():
                worker.jobs.get_nowait()
            again = asyncio.create_task(client.post(PATH, json=BODY))
            await finish(worker, await worker.jobs.get())
            assert (await again).status_code == 200, "there is room again"

    asyncio.run(main())


def test_what_even_the_reserve_does_not_take_is_sent_from_memory(settings, keyring, redis_url):
    key = keyring.key()

    async def main():
        async with (
            ScriptedWorker(redis_url, manual=True) as worker,
            serve(settings) as api,
            api.client(key) as client,
        ):
            await api.knows()
            asked = asyncio.create_task(client.post(PATH, json=BODY))
            job = await worker.jobs.get()
            async with asyncio.timeout(5):
                while not any(file.stat().st_size for file in settings.spool.iterdir()):
                    await asyncio.sleep(0.01)  # the worker may have it before the spool has
            with full_disk(0):
                await finish(worker, job)
                assert (await asked).status_code == 200
                (record,) = await settled(redis_url, 1)
                assert (await client.post(PATH, json=BODY)).status_code == 503
            assert (record.status, record.billed_tokens) == (Status.COMPLETED, 6)

    asyncio.run(main())


async def until_refused_or_running(asked, worker):
    """Wait until each is refused or at the worker, where some may still be about to be refused."""
    async with asyncio.timeout(20):
        while True:
            refused = sum(task.done() for task in asked)
            stopped = {abort.request_id for abort in worker.aborts}
            if refused + sum(job.request_id not in stopped for job in worker.seen) >= len(asked):
                return
            await asyncio.sleep(0.05)


async def answer_all(asked, worker):
    """Answer what is at the worker and what still comes, until each is answered or refused."""
    answered = 0
    async with asyncio.timeout(15):
        while not all(task.done() for task in asked):
            for job in worker.seen[answered:]:
                answered += 1
                await finish(worker, job)
            await asyncio.sleep(0.05)


async def finish(worker, job):
    await worker.emit(job, ids_of("Hello"))
    await worker.emit(job, [END], FinishReason.STOP)


def adopted(folder):
    found = []

    def take(record):
        assert not record.held
        found.append(unpack_record(record.payload))
        return True

    adopt(folder, take)
    return found
