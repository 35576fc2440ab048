"""Which models there are: what one process of the API knows, the others know when they are asked."""

import asyncio
import time

from tests.service.conftest import serve
from tests.service.scripted import MODEL, ScriptedWorker

PROMPT = {"model": MODEL, "prompt": "hi", "max_tokens": 4}


def test_a_worker_that_has_just_registered_serves_the_next_request(settings, keyring, redis_url):
    async def main():
        async with serve(settings) as api, api.client(keyring.key()) as client:
            for _ in range(5):
                async with ScriptedWorker(redis_url):
                    answer = await client.post("/v1/completions", json=PROMPT)
                    assert answer.status_code == 200, answer.text

    asyncio.run(main())


def test_unknown_names_share_one_look_at_redis(settings, keyring, redis_url):
    async def main():
        async with ScriptedWorker(redis_url), serve(settings) as api, api.client(keyring.key()) as client:
            await api.knows()
            looks = []
            refresh = api.dispatch.workers.refresh

            async def counted():
                looks.append(time.monotonic())
                await refresh()

            api.dispatch.workers.refresh = counted
            asks = [client.post("/v1/completions", json=PROMPT | {"model": f"no-{n}"}) for n in range(50)]
            answers = await asyncio.gather(*asks)
            assert {answer.status_code for answer in answers} == {404}
            assert len(looks) < 25

    asyncio.run(main())
