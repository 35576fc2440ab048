"""Workers, Redis, Postgres and API processes die in the middle: no token lost or repeated, one settlement each."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time

import httpx
import psutil
import redis as sync_redis

from engine.protocol import AbortReason, FinishReason, Status
from service.home.ports import free_port
from tests.service.conftest import NOTHING, held, serve, settled, settlements
from tests.service.scripted import END, MODEL, ScriptedWorker, ids_of

TEXT = "/v1/completions"
PROMPT = {"model": MODEL, "prompt": "hi", "stream": True}
LONG = "The quick brown fox jumps over the lazy dog. " * 3


async def read(client, body=PROMPT) -> str:
    """The text of a stream, or the error that ends it."""
    shown = ""
    async with client.stream("POST", TEXT, json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                data = json.loads(line[6:])
                if "error" in data:
                    return f"{shown}!{data['error']['code']}"
                shown += "".join(choice["text"] for choice in data["choices"])
    return shown


def worker_process(redis_url, name, *words):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.service.scripted", redis_url, name, *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline()
    return process


def test_streams_go_on_elsewhere_when_their_worker_is_killed(settings, keyring, redis_url):
    async def main():
        key = keyring.key()
        doomed = worker_process(redis_url, "host/a", "--step-s", "0.03", "--text", LONG)
        async with serve(settings) as api, api.client(key) as client:
            await api.knows()
            streams = [asyncio.create_task(read(client)) for _ in range(8)]
            await asyncio.sleep(1)
            doomed.kill()
            doomed.wait()
            successor = worker_process(redis_url, "host/a", "--step-s", "0.005", "--text", LONG)
            try:
                assert await asyncio.gather(*streams) == [LONG] * 8
                records = await settled(redis_url, 8)
            finally:
                successor.kill()
                successor.wait()
        for record in records:
            assert (record.status, record.billed_tokens) == (Status.COMPLETED, len(LONG) + 1)
            assert [seen.attempt for seen in record.attempts] == [1, 2]
            assert record.winning_attempt == 2
        assert held(redis_url) == NOTHING

    asyncio.run(main())


def test_a_request_fails_clearly_when_nobody_takes_it_over(settings, keyring, redis_url):
    async def main():
        async with serve(settings, failover_wait_s=1) as api, api.client(keyring.key()) as client:
            async with ScriptedWorker(redis_url, manual=True) as worker:
                await api.knows()
                stream = asyncio.create_task(read(client))
                await worker.emit(await worker.jobs.get(), ids_of("Hello"))
                await asyncio.sleep(0.1)
            assert await stream == "Hello!worker_lost"
            (record,) = await settled(redis_url, 1)
            assert (record.status, record.error_code, record.billed_tokens) == (Status.FAILED, "worker_lost", 0)
            again = await client.post(TEXT, json={**PROMPT, "stream": False})
            assert (again.status_code, again.json()["error"]["code"]) == (503, "no_worker")
            assert again.headers["retry-after"]

    asyncio.run(main())


def test_lost_events_are_noticed_and_old_attempts_are_not_listened_to(settings, keyring, redis_url):
    async def main():
        async with (
            ScriptedWorker(redis_url, manual=True) as worker,
            serve(settings) as api,
            api.client(keyring.key()) as client,
        ):
            await api.knows()
            stream = asyncio.create_task(read(client))
            first = await worker.jobs.get()
            await worker.emit(first, ids_of("Hel"))
            await worker.emit(first, ids_of("o"), index=4)
            second = await worker.jobs.get()
            assert (second.attempt, second.generated) == (2, [ids_of("Hel")])
            await worker.emit(first, ids_of("XXX"), index=3)
            await worker.emit(second, [*ids_of("lo"), END], FinishReason.STOP, index=3)
            assert await stream == "Hello"
            assert worker.aborts[0].reason is AbortReason.SUPERSEDED

    asyncio.run(main())


def test_redis_emptied_in_the_middle_of_a_stream_costs_no_token(settings, keyring, redis_url):
    async def main():
        async with (
            ScriptedWorker(redis_url, text=LONG, step_s=0.03) as _,
            serve(settings) as api,
            api.client(keyring.key(rpm=10)) as client,
        ):
            await api.knows()
            streams = [asyncio.create_task(read(client)) for _ in range(3)]
            await asyncio.sleep(1)
            with sync_redis.Redis.from_url(redis_url) as connection:
                connection.flushall()
            assert await asyncio.gather(*streams) == [LONG] * 3
            await api.idle()
            records = await settled(redis_url, 3)
            assert {record.status for record in records} == {Status.COMPLETED}
            assert held(redis_url) == NOTHING
            assert await read(client) == LONG

    asyncio.run(main())


def test_a_known_key_is_served_while_postgres_is_away_and_an_unknown_one_gets_503(settings, keyring, redis_url):
    key = keyring.key()

    async def main():
        async with ScriptedWorker(redis_url) as _, serve(settings) as api:
            await api.knows()
            async with api.client(key) as client, api.client("pw-unknown") as stranger:
                body = {**PROMPT, "stream": False}
                assert (await client.post(TEXT, json=body)).status_code == 200
                assert (await client.get("/health/ready")).json()["status"] == "ready"
                api.app.state.front.database.dispose()
                api.app.state.front.database.pool._creator = _refuse
                await asyncio.sleep(settings.key_cache_s + 1.1)
                assert (await client.post(TEXT, json=body)).status_code == 200
                answer = await stranger.post(TEXT, json=body)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "keys_unavailable")
                ready = await client.get("/health/ready")
                assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
                assert ready.json()["parts"]["database"]["ready"] is False

    asyncio.run(main())


def _refuse(*_):
    import psycopg

    raise psycopg.OperationalError("away")


class Service:
    """`service.server.run` as a process."""

    def __init__(self, settings, *, processes):
        self.port = free_port()
        environment = {
            **os.environ,
            "PENNYWEIGHT_DATABASE_URL": settings.database_url,
            "PENNYWEIGHT_REDIS_URL": settings.redis_url,
            "PENNYWEIGHT_HOME": str(settings.home),
            "PENNYWEIGHT_LEASE_S": "2",
            "PENNYWEIGHT_DRAIN_S": "1",
        }
        code = (
            "from service.server import run; from service.settings import Settings; "
            f"run(Settings.from_environment(), host='127.0.0.1', port={self.port}, processes={processes})"
        )
        self.process = psutil.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)

    def client(self, key) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=30)

    async def ready(self):
        async with asyncio.timeout(30), self.client("none") as client:
            while True:
                try:
                    if (await client.get("/health/ready")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.1)

    async def children(self, count) -> list[psutil.Process]:
        async with asyncio.timeout(10):
            while len(found := self.process.children()) != count:
                await asyncio.sleep(0.05)
        return found

    def stop(self, number=signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


def test_a_killed_api_process_is_replaced_at_once_and_its_requests_are_settled_as_failed(settings, keyring, redis_url):
    key = keyring.key()

    async def main():
        service = Service(settings, processes=1)
        async with ScriptedWorker(redis_url, text=LONG, step_s=0.05) as _:
            await service.ready()
            async with service.client(key) as client:
                streams = [asyncio.create_task(read(client)) for _ in range(8)]
                await asyncio.sleep(1)
                (child,) = await service.children(1)
                child.kill()
                ends = await asyncio.gather(*streams, return_exceptions=True)
                assert all(isinstance(end, httpx.TransportError) for end in ends), ends
                records = await settled(redis_url, 8)
                assert {(r.status, r.error_code, r.billed_tokens) for r in records} == {
                    (Status.FAILED, "owner_lost", 0)
                }
                assert sorted(record.origin.boot_seq for record in records) == list(range(1, 9))
                await service.ready()
                assert await read(client, {**PROMPT, "max_tokens": 3}) == "The"
                async with asyncio.timeout(6):
                    while held(redis_url) != NOTHING:
                        await asyncio.sleep(0.1)
        assert service.stop() == 0

    asyncio.run(main())


def test_sigterm_lets_streams_finish_then_fails_the_rest_and_leaves_nothing(settings, keyring, redis_url):
    key = keyring.key()

    async def main():
        service = Service(settings, processes=2)
        async with ScriptedWorker(redis_url, text=LONG, step_s=0.05) as _:
            await service.ready()
            family = [service.process, *await service.children(2)]
            async with service.client(key) as client:
                short = asyncio.create_task(read(client, {**PROMPT, "max_tokens": 20}))
                long = asyncio.create_task(read(client))
                await asyncio.sleep(0.5)
                started = time.monotonic()
                status = await asyncio.to_thread(service.stop)
                assert await short == LONG[:20]
                shown, code = (await long).split("!")
                assert LONG.startswith(shown)
                assert code == "shutting_down"
            assert status == 0
            assert time.monotonic() - started < 25
            assert not any(process.is_running() for process in family)
        found = {record.status: record for record in settlements(redis_url)}
        assert set(found) == {Status.COMPLETED, Status.FAILED}
        assert found[Status.FAILED].billed_tokens == 0
        assert held(redis_url) == NOTHING
        assert list((settings.home / "spool").glob("*.spool")) == []

    asyncio.run(main())


def test_when_the_parent_is_killed_its_children_end_too(settings, keyring, redis_url):
    async def main():
        service = Service(settings, processes=2)
        async with ScriptedWorker(redis_url) as _:
            await service.ready()
            children = await service.children(2)
            service.process.kill()
            service.process.wait()
            gone, alive = await asyncio.to_thread(psutil.wait_procs, children, 15)
            assert (len(gone), alive) == (2, [])

    asyncio.run(main())


def numbers(page: str, name: str) -> float:
    """The sum of a metric's samples."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if re.match(rf"{name}[{{ ]", line))


def test_ten_requests_a_minute_are_ten_over_two_processes_and_each_tells_what_both_counted(
    settings, keyring, redis_url
):
    key = keyring.key(rpm=10)

    async def main():
        service = Service(settings, processes=2)
        async with ScriptedWorker(redis_url) as _:
            await service.ready()
            await service.children(2)
            async with service.client(key) as client:
                answers = await asyncio.gather(
                    *[client.post(TEXT, json={**PROMPT, "stream": False}) for _ in range(40)]
                )
        assert sorted(answer.status_code for answer in answers) == [200] * 10 + [429] * 30
        for _ in range(6):  # connections of their own, so that both processes are asked
            async with service.client("none") as prometheus:
                page = (await prometheus.get("/metrics")).text
            assert numbers(page, "pennyweight_requests_total") == 10
            assert numbers(page, "pennyweight_refusals_total") == 30
            assert numbers(page, "gen_ai_server_request_duration_seconds_count") == 10
            assert numbers(page, "pennyweight_requests_running") == 0
        refused = keyring.execute("SELECT 1") and service.stop()
        assert refused == 0
        counted = keyring.execute("SELECT cause, sum(refusals) FROM refusals_15m GROUP BY cause")
        assert [(cause, int(count)) for cause, count in counted] == [("key_requests", 30)]

    asyncio.run(main())
