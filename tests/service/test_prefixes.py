"""Cached tokens on their way from the engine to the client and the books, and who shares prefixes with whom."""

import asyncio

import pytest

from engine.protocol import FinishReason
from service.settings import Settings, SettingsError
from tests.service.conftest import serve, settled
from tests.service.scripted import END, MODEL, ScriptedWorker, ids_of

PROMPT = "The quick brown fox jumps over the lazy dog."


def test_cached_tokens_are_what_the_worker_said_in_the_answer_and_in_the_settlement(settings, keyring, redis_url):
    async def main():
        async with ScriptedWorker(redis_url, manual=True) as worker, serve(settings) as api:
            await api.knows()
            async with api.client(keyring.key()) as client:
                body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5}
                asked = asyncio.create_task(client.post("/v1/completions", json=body))
                job = await worker.jobs.get()
                await worker.emit(job, ids_of("Hi"), cached=32)
                await worker.emit(job, [END], FinishReason.STOP, cached=32)
                usage = (await asked).json()["usage"]
            (record,) = await settled(redis_url, 1)
        assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (len(PROMPT), 32)
        assert (record.prompt_tokens, record.cached_tokens) == (len(PROMPT), 32)

    asyncio.run(main())


@pytest.mark.parametrize("shares", [False, True])
def test_jobs_of_all_tenants_have_one_salt_only_where_the_operator_says_so(settings, keyring, redis_url, shares):
    async def main():
        async with ScriptedWorker(redis_url) as worker, serve(settings, share_prefixes=shares) as api:
            await api.knows()
            for tenant in ("acme", "other"):
                async with api.client(keyring.key(tenant=tenant)) as client:
                    answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT})
                    assert answer.status_code == 200
            assert {job.cache_salt for job in worker.seen} == {"all" if shares else ""}
            assert len({job.origin.tenant_id for job in worker.seen}) == 2

    asyncio.run(main())


def test_sharing_is_off_unless_said_and_nothing_else_than_a_switch():
    urls = {"PENNYWEIGHT_DATABASE_URL": "postgresql://h/d", "PENNYWEIGHT_REDIS_URL": "redis://h"}
    assert Settings.from_environment(urls).cache_salt == ""
    assert Settings.from_environment({**urls, "PENNYWEIGHT_SHARE_PREFIXES": "1"}).cache_salt
    with pytest.raises(SettingsError, match="PENNYWEIGHT_SHARE_PREFIXES"):
        Settings.from_environment({**urls, "PENNYWEIGHT_SHARE_PREFIXES": "yes"})
