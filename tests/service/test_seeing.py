"""What is seen of a request: metrics, one trace, one log line; and what never is: a text or a secret."""

import asyncio
import io
import json

import pytest
import redis as sync_redis
import structlog
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.protocol import FinishReason
from service import logs
from service.telemetry import Tracing
from tests.service.conftest import serve, settled
from tests.service.scripted import MODEL, ScriptedWorker

SECRET, WORDS = "pw-CANARYKEY", "CANARYWORDS"
CHAT = "/v1/chat/completions"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": WORDS}]}


@pytest.fixture
def lines(monkeypatch):
    """The log as it is written."""
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    logs.configure()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(written), cache_logger_on_first_use=False)
    yield written
    structlog.reset_defaults()


def traced(api) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    front = api.app.state.front
    fresh = Tracing("test", SimpleSpanProcessor(exporter))
    front.tracing.__dict__.update(fresh.__dict__)
    return exporter


def test_no_text_and_no_secret_is_seen_anywhere_whatever_goes_wrong(settings, keyring, redis_url, lines):
    async def main():
        answers = []
        async with ScriptedWorker(redis_url, text=WORDS) as worker, serve(settings) as api:
            spans = traced(api)
            await api.knows()
            async with api.client(keyring.key()) as client, api.client(SECRET) as stranger:
                await client.post(CHAT, json=HELLO)
                await client.post(CHAT, json={**HELLO, "stream": True, "stop": WORDS})
                answers.append(await stranger.post(CHAT, json=HELLO))
                mistakes = (
                    {"model": WORDS},
                    {"temperature": WORDS},
                    {"stop": [WORDS] * 9},
                    {"tools": [WORDS]},
                    {"messages": [{"role": WORDS, "content": WORDS}]},
                    {"messages": [{"role": "user", "content": WORDS * 9000}]},
                    {"response_format": {"type": WORDS}},
                )
                answers += [await client.post(CHAT, json={**HELLO, **wrong}) for wrong in mistakes]
                answers.append(await client.post(CHAT, content=WORDS, headers={"content-type": "application/json"}))
                answers.append(await client.post(CHAT, content=WORDS, headers={"content-type": WORDS}))
                answers.append(await client.get(f"/{WORDS}"))
                worker.manual = True
                pending = asyncio.create_task(client.post(CHAT, json=HELLO))
                while worker.jobs.qsize() < 3:
                    await asyncio.sleep(0.01)
                await worker.emit(worker.seen[-1], [], FinishReason.FAILED, error="step_failed")
                answers.append(await pending)
                api.dispatch.open = crash
                answers.append(await client.post(CHAT, json=HELLO))
                page = (await client.get("/metrics")).text
            await settled(redis_url, 3)
        assert [a.status_code for a in answers] == [401, 404, 400, 400, 400, 400, 400, 400, 400, 415, 404, 500, 500]
        with sync_redis.Redis.from_url(redis_url) as connection:
            records = str(connection.xrange("pw:records"))
        shown = json.dumps([{**span.attributes, "name": span.name} for span in spans.get_finished_spans()], default=str)
        refusals = str(keyring.execute("SELECT * FROM refusals_15m"))
        for place in (*(a.text for a in answers), page, lines.getvalue(), shown, records, refusals):
            assert place
            assert "CANARY" not in place

    asyncio.run(main())


def crash(order):
    raise RuntimeError(f"a bug that quotes {WORDS}")


def test_a_request_is_one_trace_and_continues_the_clients(settings, keyring, redis_url):
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"

    async def main():
        async with ScriptedWorker(redis_url) as worker, serve(settings) as api:
            spans = traced(api)
            await api.knows()
            async with api.client(keyring.key()) as client:
                answer = await client.post(CHAT, json=HELLO, headers={"traceparent": parent})
            (record,) = await settled(redis_url, 1)
            server = next(span for span in spans.get_finished_spans() if span.name == f"chat {MODEL}")
            stages = [span for span in spans.get_finished_spans() if span is not server]
            assert record.origin.trace_id == "a" * 32
            assert worker.seen[0].traceparent == f"00-{'a' * 32}-{server.context.span_id:016x}-01"
            assert {stage.name for stage in stages} == {"admission", "stream"}
            assert {stage.parent.span_id for stage in stages} == {server.context.span_id}
            assert server.attributes["gen_ai.operation.name"] == "chat"
            assert server.attributes["gen_ai.usage.output_tokens"] == answer.json()["usage"]["completion_tokens"]
            assert str(record.request_id) == answer.headers["x-request-id"]

    asyncio.run(main())


def test_a_request_costs_two_calls_to_redis_and_none_to_postgres(settings, keyring, redis_url):
    async def main():
        async with ScriptedWorker(redis_url) as _, serve(settings, key_cache_s=100) as api:
            await api.knows()
            async with api.client(keyring.key(rpm=100)) as client:
                await client.post(CHAT, json=HELLO)
                with sync_redis.Redis.from_url(redis_url) as connection:
                    before = connection.info("commandstats")["cmdstat_evalsha"]["calls"]
                    renewals = api.dispatch._admission.renew

                    async def no_renewal(running):
                        return []

                    api.dispatch._admission.renew = no_renewal
                    statements = count_statements(api.app.state.front.database)
                    for _ in range(10):
                        assert (await client.post(CHAT, json=HELLO)).status_code == 200
                    calls = connection.info("commandstats")["cmdstat_evalsha"]["calls"] - before
                    api.dispatch._admission.renew = renewals
                assert calls == 20
                assert statements == []

    asyncio.run(main())


def count_statements(database):
    from sqlalchemy import event

    statements = []
    event.listen(database, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
    return statements


def test_metrics_tell_requests_tokens_and_refusals(settings, keyring, redis_url):
    async def main():
        async with ScriptedWorker(redis_url) as _, serve(settings) as api:
            await api.knows()
            async with api.client(keyring.key(rpm=2)) as client:
                before = numbers((await client.get("/metrics")).text)
                for stream in (True, False, False):
                    await client.post(CHAT, json={**HELLO, "stream": stream})
                await api.idle()
                after = numbers((await client.get("/metrics")).text)
        grown = {name: after[name] - before.get(name, 0) for name in after}
        labels = f'endpoint="{CHAT}",model="{MODEL}",status="completed"'
        assert grown[f"pennyweight_requests_total{{{labels}}}"] == 2
        assert grown[f'pennyweight_tokens_total{{kind="billed",model="{MODEL}"}}'] == 42
        assert grown['pennyweight_refusals_total{cause="key_requests"}'] == 1
        assert grown[f'pennyweight_http_requests_total{{endpoint="{CHAT}",status="429"}}'] == 1
        first = [n for name, n in grown.items() if name.startswith("gen_ai_server_time_to_first_token_seconds_count")]
        assert sum(first) == 1, "of the streamed one: the other came in one piece"

    asyncio.run(main())


def numbers(page: str) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
    return {
        name[: name.index("{") + 1] + ",".join(sorted(name[name.index("{") + 1 : -1].split(","))) + "}"
        if "{" in name
        else name: float(value)
        for name, value in lines
    }
