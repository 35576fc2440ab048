"""A client that goes away, at every point, on every endpoint: aborted, settled as cancelled once, nothing held."""

import asyncio
import contextlib
import itertools
import json

import pytest

from engine.protocol import AbortReason, FinishReason, Status
from tests.service.conftest import NOTHING, held, serve, settled, settlements
from tests.service.scripted import END, MODEL, ScriptedWorker, ids_of

BODIES = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
}

TEXT = "/v1/completions"
PROMPT = BODIES[TEXT]


class Caller:
    """One raw HTTP request that can be cut at any byte."""

    def __init__(self, api, key, path, *, stream):
        self._api, self._key, self._path = api, key, path
        self._body = json.dumps({**BODIES[path], "stream": stream}).encode()

    async def __aenter__(self):
        self.reader, self._writer = await asyncio.open_connection("127.0.0.1", self._api.port)
        head = (
            f"POST {self._path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self._key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(self._body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + self._body)
        await self._writer.drain()
        return self

    async def __aexit__(self, *_):
        self.cut()

    def cut(self):
        self._writer.transport.abort()

    async def until(self, text: bytes):
        async with asyncio.timeout(5):
            return await self.reader.readuntil(text)


POINTS = ["admission", "first", "middle", "done"]


@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_goes_away_is_settled_as_cancelled_and_holds_nothing(settings, keyring, redis_url, path):
    key = keyring.key(concurrency=1)

    async def main():
        async with ScriptedWorker(redis_url, manual=True) as worker, serve(settings) as api:
            await api.knows()
            for number, (stream, point) in enumerate(itertools.product([True, False], POINTS), start=1):
                worker.manual, worker.answers_aborts, worker.aborts = True, True, []
                await one(api, worker, key, path, stream=stream, point=point)
                record = (await settled(redis_url, 2 * number - 1))[-1]
                assert (record.status, record.finish_reason) == (Status.CANCELLED, "cancelled")
                assert record.delivered_tokens <= record.billed_tokens <= record.generated_tokens
                assert record.generated_tokens == {"middle": 5, "done": 6}.get(point, 0), (stream, point)
                if stream and point in {"middle", "done"}:
                    assert record.delivered_tokens == 5
                if point != "done":
                    assert [abort.reason for abort in worker.aborts] == [AbortReason.CLIENT_GONE]
                assert held(redis_url) == NOTHING
                worker.manual = False
                async with api.client(key) as client:
                    assert (await client.post(path, json=BODIES[path])).status_code == 200, "the slot is free again"
                await settled(redis_url, 2 * number)
                while not worker.jobs.empty():
                    worker.jobs.get_nowait()

    asyncio.run(main())


async def one(api, worker, key, path, *, stream, point):
    with slow_admission(api) if point == "admission" else contextlib.nullcontext():
        async with Caller(api, key, path, stream=stream) as caller:
            await bring_to(point, caller, worker, stream=stream)
            caller.cut()
            await api.idle()


@contextlib.contextmanager
def slow_admission(api):
    """An admission that takes as long as a person needs to go away."""
    admit = api.dispatch.admit

    async def slowly(order, job):
        await asyncio.sleep(0.3)
        return await admit(order, job)

    api.dispatch.admit = slowly
    yield
    api.dispatch.admit = admit


async def bring_to(point, caller, worker, *, stream):
    """Play the worker's part up to ``point``."""
    if point == "admission":
        await asyncio.sleep(0.1)
        return
    job = await asyncio.wait_for(worker.jobs.get(), 5)
    if point == "first":
        return
    await worker.emit(job, ids_of("Hello"))
    if stream:
        await caller.until(b"Hello")
    if point == "done":
        worker.answers_aborts = False
        caller.cut()  # the last token has been sent, the end of the answer has not
        await asyncio.sleep(0.05)
        await worker.emit(job, [END], FinishReason.STOP)
    else:
        await asyncio.sleep(0.1)


def test_tokens_until_the_abort_took_effect_are_billed(settings, keyring, redis_url):
    async def main():
        async with ScriptedWorker(redis_url, manual=True, answers_aborts=False) as worker, serve(settings) as api:
            await api.knows()
            async with Caller(api, keyring.key(), "/v1/completions", stream=True) as caller:
                job = await worker.jobs.get()
                await worker.emit(job, ids_of("Hello"))
                await caller.until(b"Hello")
            await asyncio.sleep(0.1)
            await worker.emit(job, ids_of(" yo"))  # the two steps that were under way
            await worker.emit(job, [], FinishReason.CANCELLED)
            (record,) = await settled(redis_url, 1)
            assert (record.delivered_tokens, record.billed_tokens, record.generated_tokens) == (5, 8, 8)

    asyncio.run(main())


@pytest.mark.parametrize("worker_sees_it", [True, False], ids=["seen by the worker", "seen by its owner"])
def test_a_deadline_gives_no_free_tokens(settings, keyring, redis_url, worker_sees_it):
    """Whoever asks for more than fits before the deadline pays what was streamed; a whole answer never came."""

    async def main():
        async with (
            ScriptedWorker(redis_url, manual=True) as worker,
            serve(settings, request_timeout_s=3 if worker_sees_it else 1) as api,
            api.client(keyring.key(tpm=1000)) as client,
        ):
            await api.knows()
            for stream in (True, False):
                asked = asyncio.create_task(client.post(TEXT, json={**PROMPT, "stream": stream}))
                job = await worker.jobs.get()
                await worker.emit(job, ids_of("Hello"))
                if worker_sees_it:
                    await worker.emit(job, [], FinishReason.EXPIRED, error="deadline_exceeded")
                answer = await asked
                assert '"code":"deadline_exceeded"' in answer.text.replace(" ", "")
                assert answer.status_code == (200 if stream else 504)
            whole, streamed = sorted(await settled(redis_url, 2), key=lambda record: record.origin.stream)
            assert (streamed.status, streamed.error_code) == (Status.CANCELLED, "deadline_exceeded")
            assert (streamed.generated_tokens, streamed.delivered_tokens, streamed.billed_tokens) == (5, 5, 5)
            assert (whole.status, whole.billed_tokens, whole.delivered_tokens) == (Status.FAILED, 0, 0)
            window = await client.post(TEXT, json={**PROMPT, "max_tokens": 994, "stream": False})
            assert window.status_code == 429, "prompt and five streamed tokens stay in the window"
        assert held(redis_url) == NOTHING

    asyncio.run(main())


def test_a_client_that_stalls_holds_up_nobody_and_its_buffers_are_bounded(settings, keyring, redis_url):
    key = keyring.key()

    async def main():
        async with ScriptedWorker(redis_url, text="x" * 4000) as worker, serve(settings) as api:
            await api.knows()
            stalled = [Caller(api, key, "/v1/completions", stream=True) for _ in range(5)]
            for caller in stalled:
                await caller.__aenter__()
            worker.answer = lambda _: [*ids_of("ok"), END]
            async with api.client(key) as client, asyncio.timeout(5):
                for _ in range(5):
                    assert (await client.post("/v1/completions", json=BODIES["/v1/completions"])).status_code == 200
            for caller in stalled:
                caller.cut()
            await api.idle()
            await settled(redis_url, 10)
            assert held(redis_url) == NOTHING

    asyncio.run(main())


def test_a_hundred_that_go_away_leave_no_slot_behind(settings, keyring, redis_url):
    key = keyring.key(concurrency=200)

    async def main():
        async with ScriptedWorker(redis_url, step_s=0.02) as _, serve(settings) as api:
            await api.knows()

            async def come_and_go(number):
                async with Caller(api, key, "/v1/chat/completions", stream=bool(number % 2)):
                    await asyncio.sleep(number % 10 / 50)

            await asyncio.gather(*[come_and_go(number) for number in range(100)])
            await api.idle()
            await asyncio.sleep(1)  # records leave in batches
            found = settlements(redis_url)
            assert held(redis_url) == NOTHING
            assert sorted(record.origin.boot_seq for record in found) == list(range(1, len(found) + 1))
            assert all(r.delivered_tokens <= r.billed_tokens <= r.generated_tokens for r in found)

    asyncio.run(main())
