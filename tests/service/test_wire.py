"""OpenAI's wire to the letter: goldens, errors for every mistake, headers, and the official client."""

import asyncio
import json

import httpx
import openai
import pytest

from engine.protocol import Status
from tests.service.conftest import NOTHING, held, serve, settled, settlements
from tests.service.scripted import MODEL, ScriptedWorker

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": MODEL, "prompt": "hi"}
USAGE = {
    "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
    "completion_tokens_details": {
        "reasoning_tokens": 0,
        "audio_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    },
}


def with_api(settings, redis_url, work, *, worker=None, **changes):
    async def main():
        async with ScriptedWorker(redis_url, **(worker or {})) as scripted, serve(settings, **changes) as api:
            await api.knows()
            await work(api, scripted)

    asyncio.run(main())


def events(answer: httpx.Response) -> list:
    """The stream's data, frozen where it changes from run to run."""
    lines = answer.text.split("\n\n")
    assert lines[-1] == ""
    assert lines[-2] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [freeze(json.loads(line[6:])) for line in lines[:-2]]


def freeze(body: dict) -> dict:
    assert body.pop("created") > 1.7e9
    body["id"] = body["id"].partition("-")[0]
    return body


def test_answers_look_exactly_like_openai(settings, keyring, redis_url):
    async def work(api, _):
        async with api.client(keyring.key()) as client:
            chat, text = await client.post(CHAT, json=HELLO), await client.post(TEXT, json=PROMPT)
        assert freeze(chat.json()) == {
            "id": "chatcmpl",
            "object": "chat.completion",
            "model": MODEL,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Hi.", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 21, "completion_tokens": 4, "total_tokens": 25, **USAGE},
            "system_fingerprint": "scripted-revision",
        }
        assert freeze(text.json()) == {
            "id": "cmpl",
            "object": "text_completion",
            "model": MODEL,
            "system_fingerprint": "scripted-revision",
            "choices": [{"text": "Hi.", "index": 0, "logprobs": None, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6, **USAGE},
        }

    with_api(settings, redis_url, work, worker={"text": "Hi."})


@pytest.mark.parametrize("asked", [None, False, True])
def test_streams_look_exactly_like_openai(settings, keyring, redis_url, asked):
    options = {} if asked is None else {"stream_options": {"include_usage": asked}}
    extra = {"usage": None} if asked else {}

    def chunk(object_, choices, **more):
        name = "chatcmpl" if object_ == "chat.completion.chunk" else "cmpl"
        head = {"id": name, "object": object_, "model": MODEL, "system_fingerprint": "scripted-revision"}
        return {**head, "choices": choices, **extra, **more}

    def delta(delta, finish=None):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return chunk("chat.completion.chunk", [choice])

    def part(text, finish=None):
        return chunk("text_completion", [{"text": text, "index": 0, "logprobs": None, "finish_reason": finish}])

    async def work(api, _):
        async with api.client(keyring.key()) as client:
            chat = await client.post(CHAT, json={**HELLO, "stream": True, **options})
            text = await client.post(TEXT, json={**PROMPT, "stream": True, **options})
        total = {"completion_tokens": 4, **USAGE}
        last = [chunk("chat.completion.chunk", [], usage={"prompt_tokens": 21, "total_tokens": 25, **total})]
        opening = delta({"role": "assistant", "content": "", "refusal": None})
        assert events(chat) == [opening, delta({"content": "Hi."}), delta({}, "stop"), *(last if asked else [])]
        last = [chunk("text_completion", [], usage={"prompt_tokens": 2, "total_tokens": 6, **total})]
        assert events(text) == [part("Hi."), part("", "stop"), *(last if asked else [])]
        assert chat.headers["content-type"] == "text/event-stream; charset=utf-8"

    with_api(settings, redis_url, work, worker={"text": "Hi."})


def test_the_official_client_reads_answers_streams_models_and_errors(settings, keyring, redis_url):
    async def work(api, _):
        client = openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key=keyring.key(rpm=4), max_retries=0)
        whole = await client.chat.completions.create(**HELLO, max_completion_tokens=50, seed=1, temperature=0)
        assert whole.choices[0].message.content == "Hello there, friend."
        stream = await client.chat.completions.create(**HELLO, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there, friend."
        assert chunks[-1].usage == whole.usage
        text = await client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=5)
        assert (text.choices[0].text, text.choices[0].finish_reason) == ("Hello", "length")
        assert text.usage.prompt_tokens == 3
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("none")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**HELLO, n=2)
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "n")
        await client.completions.create(model=MODEL, prompt=["one"])
        with pytest.raises(openai.RateLimitError) as limited:
            await client.completions.create(model=MODEL, prompt="x")
        assert limited.value.code == "rate_limit_exceeded"
        assert 58 <= int(limited.value.response.headers["retry-after"]) <= 60
        assert float(limited.value.response.headers["retry-after-ms"]) > 50_000
        assert limited.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        wrong = openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="pw-wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await wrong.chat.completions.create(**HELLO)

    with_api(settings, redis_url, work)


MISTAKES = [
    (b"{", 400, "invalid_json", None),
    (b"", 400, None, None),
    (b"[]", 400, "invalid_value", None),
    ({**HELLO, "messages": []}, 400, "invalid_value", "messages"),
    ({**HELLO, "messages": [{"role": "user"}]}, 400, None, "messages[0].content"),
    ({**HELLO, "messages": [{"role": "boss", "content": "x"}]}, 400, "invalid_value", "messages[0].role"),
    ({**HELLO, "messages": [{"role": "tool", "content": "x"}]}, 400, "unsupported_parameter", "messages[0].role"),
    ({"messages": HELLO["messages"]}, 400, "missing_required_parameter", "model"),
    ({**HELLO, "model": "none"}, 404, "model_not_found", "model"),
    ({**HELLO, "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    ({**HELLO, "max_tokens": "5"}, 400, "invalid_value", "max_tokens"),
    ({**HELLO, "max_tokens": 9000}, 400, "context_length_exceeded", "messages"),
    ({**HELLO, "messages": [{"role": "user", "content": "x" * 9000}]}, 400, "context_length_exceeded", "messages"),
    ({**HELLO, "temperature": 2.1}, 400, "invalid_value", "temperature"),
    ({**HELLO, "top_p": 0}, 400, "invalid_value", "top_p"),
    ({**HELLO, "stop": list("abcde")}, 400, None, "stop"),
    ({**HELLO, "stop": ""}, 400, "invalid_value", "stop"),
    ({**HELLO, "seed": 1 << 64}, 400, "invalid_value", "seed"),
    ({**HELLO, "stream": 1}, 400, "invalid_value", "stream"),
    ({**HELLO, "stream_options": {"include_usage": True}}, 400, None, "stream_options"),
    ({**HELLO, "min_tokens": 99, "max_tokens": 9}, 400, None, "min_tokens"),
    ({**HELLO, "bananas": 1}, 400, "unknown_parameter", "bananas"),
    *[
        ({**HELLO, name: value}, 400, "unsupported_parameter", name)
        for name, value in {
            "n": 2,
            "tools": [{"type": "function"}],
            "tool_choice": "required",
            "functions": [{}],
            "response_format": {"type": "json_object"},
            "audio": {},
            "modalities": ["audio"],
            "prediction": {},
            "reasoning_effort": "high",
            "service_tier": "priority",
            "store": True,
            "verbosity": "low",
            "web_search_options": {},
        }.items()
    ],
]


def test_every_mistake_is_named_and_nothing_is_enqueued_or_charged(settings, keyring, redis_url):
    async def work(api, scripted):
        async with api.client(keyring.key()) as client:
            for body, status, code, param in MISTAKES:
                content = body if isinstance(body, bytes) else json.dumps(body)
                answer = await client.post(CHAT, content=content, headers={"content-type": "application/json"})
                error = answer.json()["error"]
                assert (answer.status_code, error["code"], error["param"]) == (status, code, param), (body, error)
                assert set(error) == {"message", "type", "param", "code"}
                assert answer.headers["x-request-id"]
            for prompt in (["a", "b"], [[1], [2]], [1, "a"], [], [999_999], "", [5] * 9000):
                answer = await client.post(TEXT, json={"model": MODEL, "prompt": prompt})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt"), prompt
            for method, path, status in (("GET", "/nope", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405)):
                answer = await client.request(method, path)
                assert answer.status_code == status
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            form = await client.post(CHAT, content=json.dumps(HELLO), headers={"content-type": "text/plain"})
            assert (form.status_code, form.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert scripted.seen == []
        assert settlements(redis_url) == []
        assert held(redis_url) == NOTHING

    with_api(settings, redis_url, work)


def test_a_body_that_is_too_large_is_refused_early(settings, keyring, redis_url):
    async def work(api, scripted):
        async with api.client(keyring.key()) as client:
            announced = await client.post(CHAT, json={**HELLO, "user": "x" * 10_000_000})
            assert announced.status_code == 413
            assert announced.json()["error"]["type"] == "invalid_request_error"

            async def endless():
                for _ in range(100):
                    yield b"x" * 100_000

            chunked = await client.post(CHAT, content=endless(), headers={"content-type": "application/json"})
            assert chunked.status_code == 413
        assert scripted.seen == []

    with_api(settings, redis_url, work)


def test_keys_that_are_missing_wrong_revoked_or_expired_are_401_and_never_repeated(settings, keyring, redis_url):
    good, revoked, expired = keyring.key(), keyring.key(), keyring.key()
    keyring.execute(f"UPDATE api_keys SET revoked_at = now() WHERE prefix = '{revoked[:11]}'")
    keyring.execute(f"UPDATE api_keys SET expires_at = now() - interval '1 s' WHERE prefix = '{expired[:11]}'")

    async def work(api, _):
        async with api.client() as client:
            headers = [{}, {"authorization": "Basic x"}, {"authorization": "Bearer"}]
            headers += [{"authorization": f"Bearer {key}"} for key in ("pw-wrong", "käse", revoked, expired)]
            for header in headers:
                answer = await client.post(CHAT, json=HELLO, headers={k: v.encode() for k, v in header.items()})
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), header
                assert not any(key in answer.text for key in ("pw-", "käse"))
            admin = await client.post(CHAT, json=HELLO, headers={"authorization": f"Bearer {keyring.admin()}"})
            assert (admin.status_code, admin.json()["error"]["code"]) == (403, "insufficient_permissions")
            fine = await client.post(CHAT, json=HELLO, headers={"authorization": f"bearer {good}"})
            assert fine.status_code == 200
            keyring.execute(f"UPDATE api_keys SET revoked_at = now() WHERE prefix = '{good[:11]}'")
            await asyncio.sleep(settings.key_cache_s + 0.1)
            late = await client.post(CHAT, json=HELLO, headers={"authorization": f"Bearer {good}"})
            assert late.status_code == 401

    with_api(settings, redis_url, work)


def test_neutral_and_labelling_parameters_are_accepted(settings, keyring, redis_url):
    harmless = {
        "n": 1,
        "tools": [],
        "logprobs": False,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "store": False,
        "user": "u",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "top_k": -1,
        "min_p": 0.0,
        "ignore_eos": True,
        "min_tokens": 1,
        "stop": None,
        "seed": -5,
    }

    async def work(api, scripted):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        history = [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": parts, "name": "n"},
            {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": None},
            {"role": "user", "content": "y"},
        ]
        async with api.client(keyring.key()) as client:
            answer = await client.post(CHAT, json={"model": MODEL, "messages": history, **harmless})
        assert answer.status_code == 200, answer.text
        job = scripted.seen[0]
        assert (job.sampling.ignore_eos, job.sampling.min_tokens, job.sampling.top_k) == (True, 1, 0)
        assert job.sampling.seed == (1 << 63) - 5
        assert job.sampling.max_tokens == 256, "the model's default"

    with_api(settings, redis_url, work)


def test_a_stop_string_over_token_borders_ends_the_text_and_the_bill(settings, keyring, redis_url):
    async def work(api, scripted):
        async with api.client(keyring.key()) as client:
            for stream in (False, True):
                answer = await client.post(TEXT, json={**PROMPT, "stop": ["lo t"], "stream": stream})
                if stream:
                    text = "".join(choice["text"] for chunk in events(answer) for choice in chunk["choices"])
                else:
                    text = answer.json()["choices"][0]["text"]
                assert text == "Hel"
        await api.idle()
        for record in await settled(redis_url, 2):
            assert (record.status, record.finish_reason) == (Status.COMPLETED, "stop")
            assert (record.billed_tokens, record.delivered_tokens) == (7, 7)
            assert record.generated_tokens >= 7
        assert all(abort.keep == 7 for abort in scripted.aborts)

    with_api(settings, redis_url, work, worker={"step_s": 0.01})
