"""Penalties, bias, stop ids and logprobs on the wire: of exactly the tokens shown, each once, in OpenAI's words."""

import asyncio
import itertools
import json

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.keys import RECORDS
from engine.protocol import Event, FinishReason
from service.completion import Completion, joined
from service.text import Text
from service.vocabulary import Vocabulary
from tests.service.conftest import NOTHING, held, serve, settled, settlements
from tests.service.scripted import END, TEMPLATE, TOKENIZER, ScriptedWorker, ids_of, logprob_of
from tests.service.test_wire import CHAT, HELLO, PROMPT, with_api
from tests.service.test_wire import TEXT as COMPLETIONS

TEXT = Text(TOKENIZER.to_str(), TEMPLATE, {"eos_token": "<|im_end|>"})
START = 256
words = st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=30)


def merged_tokenizer() -> Tokenizer:
    """Byte-level, with "ll" and "llo" as tokens of their own."""
    vocab = {symbol: i for i, symbol in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ll", "llo"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("l", "l"), ("ll", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def told_of(ids, stops=(), *, text=TEXT, together=1, **settings):
    """(text shown, what is told) of a completion whose ids come ``together`` at a time."""
    completion = Completion(text, stops, **settings)
    found = []
    for at in range(0, len(ids), together):
        some = ids[at : at + together]
        completion.push(some, [logprob_of(token, 2) for token in some])
        found.append(completion.take())
    completion.finish()
    whole = joined(piece for piece in (*found, completion.take()) if piece)
    return whole.text, whole.told


def names(told):
    return [one.drawn.name for one in told]


@given(words, st.integers(1, 7))
def test_bytes_of_the_told_tokens_are_the_text_however_it_comes(text, together):
    shown, told = told_of([*ids_of(text), END], together=together, ending={END})
    assert shown == text
    assert b"".join(one.drawn.bytes for one in told) == text.encode()
    assert [one.drawn.logprob for one in told] == [logprob_of(token, 0).logprob for token in ids_of(text)]
    assert all(text[one.offset :].encode().startswith(one.drawn.bytes) for one in told if one.drawn.bytes[0] < 0x80)


@given(words, st.lists(st.text("ab€", min_size=1, max_size=3), min_size=1, max_size=3), st.integers(1, 5))
def test_nothing_is_told_of_what_a_stop_string_cut_off(text, stops, together):
    shown, told = told_of(ids_of(text + "ba€b" + text), stops, together=together)
    assert b"".join(one.drawn.bytes for one in told) == shown.encode()


def test_a_token_that_a_stop_string_cut_into_is_not_shown_and_not_told_of():
    text = Text(merged_tokenizer().to_str(), "", {})
    ids = text.encode("Hello you", most=100)
    assert told_of(ids, text=text)[0] == "Hello you"
    assert names(told_of(ids, text=text)[1]) == ["H", "e", "llo", " ", "y", "o", "u"]
    shown, told = told_of(ids, ["lo"], text=text)
    assert (shown, names(told)) == ("Hel", ["H", "e"])
    shown, told = told_of(ids, ["o y"], text=text)
    assert (shown, names(told)) == ("Hell", ["H", "e"])
    shown, told = told_of(ids, ["lo!"], text=text)
    assert (shown, names(told)) == ("Hello you", ["H", "e", "llo", " ", "y", "o", "u"]), "held back, then shown"


def test_what_ends_a_completion_has_no_text_and_special_tokens_no_bytes():
    full_stop = ids_of(".")[0]
    shown, told = told_of([*ids_of("Hi"), full_stop], ending={full_stop})
    assert (shown, names(told)) == ("Hi", ["H", "i"])
    shown, told = told_of([START, *ids_of("Hi"), END, END])
    assert (shown, names(told)) == ("Hi", ["<|im_start|>", "H", "i", "<|im_end|>", "<|im_end|>"])
    assert [one.drawn.bytes for one in told] == [None, b"H", b"i", None, None]
    assert [one.offset for one in told] == [0, 0, 1, 2, 2]


def test_bytes_are_known_for_vocabularies_of_both_kinds():
    vocab = {"<unk>": 0, "▁the": 1, "<0xC3>": 2, "<0xA9>": 3, "a▁b": 4}
    pieces = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    pieces.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieces.add_special_tokens(["<unk>"])
    pieces.add_tokens(["<think>"])
    found = Vocabulary(pieces)
    assert [found.bytes_of(n) for n in range(1, 7)] == [b" the", b"\xc3", b"\xa9", b"a b", b"<think>", None]
    assert [found.name_of(n) for n in (0, 1, 2, 5, 6)] == ["<unk>", " the", "\\xc3", "<think>", ""]
    assert found.bytes_of(0) is None
    level = Vocabulary(TOKENIZER)
    assert sorted(level.bytes_of(n) for n in range(256)) == [bytes([n]) for n in range(256)]


def expected_chat(text, top):
    def token(one, logprob):
        return {"token": TEXT.vocabulary.name_of(one), "logprob": logprob, "bytes": list(TEXT.vocabulary.bytes_of(one))}

    content = []
    for one in ids_of(text):
        told = logprob_of(one, top)
        best = [token(other, value) for other, value in zip(told.ids, told.logprobs, strict=True)]
        content.append({**token(one, told.logprob), "top_logprobs": best})
    return {"content": content, "refusal": None}


def expected_text(text, top, name):
    ids = ids_of(text)
    best = []
    for one in ids:
        told = logprob_of(one, top)
        pairs = [*zip(told.ids, told.logprobs, strict=True), (one, told.logprob)]
        best.append({name(other): value for other, value in reversed(pairs)})
    return {
        "tokens": [name(one) for one in ids],
        "token_logprobs": [logprob_of(one, 0).logprob for one in ids],
        "top_logprobs": best,
        "text_offset": list(range(len(ids))),
    }


@pytest.mark.parametrize("top", [None, 0, 2, 20])
def test_chat_tells_logprobs_as_openai_does_whole_or_streamed(settings, keyring, redis_url, top):
    asked = {**HELLO, "logprobs": True, **({} if top is None else {"top_logprobs": top})}

    async def work(api, scripted):
        async with api.client(keyring.key()) as client:
            whole = await client.post(CHAT, json=asked)
            stream = await client.post(CHAT, json={**asked, "stream": True})
        assert whole.json()["choices"][0]["logprobs"] == expected_chat("Hi you", top or 0)
        lines = [json.loads(line[6:]) for line in stream.text.split("\n\n") if line.startswith("data: {")]
        told = [line["choices"][0]["logprobs"] for line in lines]
        assert told[0] is told[-1] is None, "neither the opening nor the end of a stream has tokens"
        for line in lines[1:-1]:
            shown = b"".join(bytes(one["bytes"]) for one in line["choices"][0]["logprobs"]["content"])
            assert shown.decode() == line["choices"][0]["delta"]["content"]
        content = [one for part in told[1:-1] for one in part["content"]]
        assert content == expected_chat("Hi you", top or 0)["content"]
        assert len(told) > 3
        assert {job.sampling.logprobs for job in scripted.seen} == {top or 0}

    with_api(settings, redis_url, work, worker={"text": "Hi you", "step_s": 0.02})


@pytest.mark.parametrize("top", [0, 3, 5])
def test_completions_tell_logprobs_as_openai_does_whole_or_streamed(settings, keyring, redis_url, top):
    async def work(api, _):
        async with api.client(keyring.key()) as client:
            whole = await client.post(COMPLETIONS, json={**PROMPT, "logprobs": top})
            stream = await client.post(COMPLETIONS, json={**PROMPT, "logprobs": top, "stream": True})
        expected = expected_text("Hi you", top, TEXT.vocabulary.name_of)
        assert whole.json()["choices"][0]["logprobs"] == expected
        lines = [json.loads(line[6:])["choices"][0] for line in stream.text.split("\n\n") if "data: {" in line]
        told = [line["logprobs"] for line in lines if line["logprobs"]]
        for name, values in expected.items():
            assert [value for part in told for value in part[name]] == values
        assert lines[-1]["logprobs"] is None

    with_api(settings, redis_url, work, worker={"text": "Hi you", "step_s": 0.02})


def test_a_character_of_several_tokens_comes_whole_with_the_bytes_of_each(settings, keyring, redis_url):
    async def work(api, _):
        async with api.client(keyring.key()) as client:
            chat = await client.post(CHAT, json={**HELLO, "logprobs": True, "stream": True})
            text = await client.post(COMPLETIONS, json={**PROMPT, "logprobs": 1})
        lines = [json.loads(line[6:])["choices"][0] for line in chat.text.split("\n\n") if "data: {" in line]
        (emoji,) = [line for line in lines if line["delta"].get("content") == "😂"]
        content = emoji["logprobs"]["content"]
        assert [one["token"] for one in content] == ["\\xf0", "\\x9f", "\\x98", "\\x82"]
        assert bytes(byte for one in content for byte in one["bytes"]).decode() == "😂"
        told = text.json()["choices"][0]["logprobs"]
        assert told["tokens"] == ["a", *(f"bytes:\\x{byte:x}" for byte in "😂".encode()), "b"]
        assert told["text_offset"] == [0, 1, 1, 1, 1, 2]
        assert all(len(best) == 2 for best in told["top_logprobs"]), "the drawn one beside the likeliest"

    with_api(settings, redis_url, work, worker={"text": "a😂b", "step_s": 0.01})


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_end_where_a_stop_string_or_a_stop_token_ends_the_text(settings, keyring, redis_url, stream):
    async def work(api, scripted):
        async with api.client(keyring.key()) as client:
            for stop in ({"stop": ["lo t"]}, {"stop_token_ids": [ids_of("l")[0]]}):
                answer = await client.post(COMPLETIONS, json={**PROMPT, **stop, "logprobs": 0, "stream": stream})
                bodies = [line[6:] for line in answer.text.split("\n\n") if "data: {" in line]
                choices = [json.loads(body)["choices"][0] for body in bodies or [answer.text]]
                text = "".join(choice["text"] for choice in choices)
                told = [token for choice in choices for token in (choice["logprobs"] or {"tokens": []})["tokens"]]
                assert "".join(told) == text == ("Hel" if "stop" in stop else "He")
                assert choices[-1]["finish_reason"] == "stop"
        await api.idle()
        assert scripted.seen[1].sampling.stop_token_ids == (ids_of("l")[0],)
        assert [record.billed_tokens for record in await settled(redis_url, 2)] == [7, 3], "as without logprobs"

    def answer(job):
        ids = [*ids_of("Hello there"), END]
        ends = [at + 1 for at, token in enumerate(ids) if token in job.sampling.stop_token_ids]
        return ids[: min(ends, default=len(ids))]

    async def main():
        async with ScriptedWorker(redis_url, step_s=0.01) as scripted, serve(settings) as api:
            scripted.answer = answer
            await api.knows()
            await work(api, scripted)

    asyncio.run(main())


def test_logprobs_go_on_after_a_failover_none_twice_none_missing(settings, keyring, redis_url):
    ids = ids_of("Hello 😂 there")

    async def main():
        async with serve(settings) as api, api.client(keyring.key()) as client:
            async with ScriptedWorker(redis_url, "host/a", manual=True) as first:
                await api.knows()
                body = {**PROMPT, "logprobs": 2, "max_tokens": len(ids)}
                request = asyncio.create_task(client.post(COMPLETIONS, json=body))
                job = await first.jobs.get()
                await first.emit(job, ids[:3])
                await first.emit(job, ids[3:8])  # in the middle of the character
                await asyncio.sleep(0.2)
            async with ScriptedWorker(redis_url, "host/b", manual=True) as second:
                again = await second.jobs.get()
                assert again.generated == [ids[:8]]
                assert again.sampling == job.sampling
                await second.emit(again, ids[8:], FinishReason.LENGTH)
                answer = (await request).json()["choices"][0]
        assert answer["text"] == "Hello 😂 there"
        assert answer["logprobs"]["token_logprobs"] == [logprob_of(token, 0).logprob for token in ids]

    asyncio.run(main())


def test_a_worker_that_does_not_know_logprobs_is_left_for_one_that_does(settings, keyring, redis_url, monkeypatch):
    async def main():
        async with serve(settings) as api, api.client(keyring.key()) as client:
            async with ScriptedWorker(redis_url, "host/a", manual=True) as older:
                await api.knows()
                request = asyncio.create_task(client.post(COMPLETIONS, json={**PROMPT, "logprobs": 0}))
                job = await older.jobs.get()
                with monkeypatch.context() as patch:
                    patch.setattr("tests.service.scripted.Event", lambda **words: _without_logprobs(words))
                    await older.emit(job, ids_of("He"))
                assert (await older.jobs.get()).attempt == 2
            async with ScriptedWorker(redis_url, "host/b", text="Hi") as newer:
                assert (await request).json()["choices"][0]["logprobs"]["tokens"] == ["H", "i"]
                assert newer.seen[0].generated == [[]]

    asyncio.run(main())


def _without_logprobs(words):
    return Event(**{**words, "logprobs": None})


SETTINGS = {
    "repetition_penalty": 1.2,
    "presence_penalty": -2,
    "frequency_penalty": 0.5,
    "stop_token_ids": [5, 6],
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_asked_of_the_draw_reaches_the_worker(settings, keyring, redis_url, path):
    async def work(api, scripted):
        body = HELLO if path == CHAT else PROMPT
        async with api.client(keyring.key()) as client:
            asked = {**SETTINGS, "logit_bias": {"12": -100, "0": 1.5, "7": 0}}
            answer = await client.post(path, json={**body, **asked})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["logprobs"] is None
            await client.post(path, json=body | dict.fromkeys([*asked, "logprobs"]))
        one, other = (job.sampling for job in scripted.seen)
        assert {name: getattr(one, name) for name in SETTINGS} == {**SETTINGS, "stop_token_ids": (5, 6)}
        assert one.logit_bias == ((12, -100.0), (0, 1.5))
        assert (other.repetition_penalty, other.presence_penalty, other.logit_bias) == (1.0, 0.0, ())
        assert (other.stop_token_ids, other.logprobs) == ((), None)

    with_api(settings, redis_url, work)


BAD = {
    "repetition_penalty": [0, -1, 101, "1", True],
    "presence_penalty": [2.1, -2.1, "0", True, [1]],
    "frequency_penalty": [2.1, -2.1, {}, False],
    "logit_bias": [
        [],
        {"a": 1},
        {"-1": 1},
        {"1": 101},
        {"1": "5"},
        {"1": True},
        {"1": None},
        {"99999": 1},
        {"01": 1},
        {"": 1},
        {"1" * 5000: 1},
        {"١": 1},
        {str(n): 1 for n in range(1025)},
    ],
    "stop_token_ids": [5, [258], ["1"], [True], [0] * 129],
}
BAD_HERE = {
    CHAT: {"logprobs": [1, "true", [True]], "top_logprobs": [21, -1, True, "5", 5]},
    COMPLETIONS: {"logprobs": [6, -1, True, "1", 1.5], "echo": [True], "top_logprobs": [1]},
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_wrong_types_and_ranges_are_refused_by_name_and_charge_nothing(settings, keyring, redis_url, path):
    async def work(api, scripted):
        body = HELLO if path == CHAT else PROMPT
        wrong = {**BAD, **BAD_HERE[path]}
        async with api.client(keyring.key()) as client:
            for name, value in itertools.chain(*([(name, one) for one in values] for name, values in wrong.items())):
                answer = await client.post(path, json={**body, name: value})
                error = answer.json()["error"]
                assert answer.status_code == 400, (name, value)
                assert error["param"].partition("[")[0] == name, (name, value, error)
                assert name in error["message"] or "Token ids" in error["message"], error
                assert error["type"] == "invalid_request_error"
            for word in (b"NaN", b"Infinity", b"1e999"):
                content = json.dumps(body)[:-1].encode() + b', "presence_penalty": ' + word + b"}"
                answer = await client.post(path, content=content, headers={"content-type": "application/json"})
                assert answer.status_code == 400
        assert scripted.seen == []
        assert settlements(redis_url) == []
        assert held(redis_url) == NOTHING

    with_api(settings, redis_url, work)


def test_the_official_client_reads_logprobs(settings, keyring, redis_url):
    async def work(api, _):
        client = openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key=keyring.key(), max_retries=0)
        chat = await client.chat.completions.create(**HELLO, logprobs=True, top_logprobs=2)
        assert "".join(one.token for one in chat.choices[0].logprobs.content) == "Hi."
        assert [len(one.top_logprobs) for one in chat.choices[0].logprobs.content] == [2, 2, 2]
        text = await client.completions.create(**PROMPT, logprobs=2, logit_bias={"5": 1}, presence_penalty=1)
        assert text.choices[0].logprobs.tokens == ["H", "i", "."]
        stream = await client.chat.completions.create(**HELLO, logprobs=True, stream=True)
        parts = [chunk.choices[0].logprobs async for chunk in stream]
        assert "".join(one.token for part in parts if part for one in part.content) == "Hi."
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**HELLO, logprobs=True, top_logprobs=21)
        assert caught.value.param == "top_logprobs"

    with_api(settings, redis_url, work, worker={"text": "Hi."})


def test_logprobs_are_in_no_log_and_no_record(settings, keyring, redis_url, capfd):
    async def work(api, scripted):
        async with api.client(keyring.key()) as client:
            body = {**PROMPT, "logprobs": 5, "max_tokens": 1000}
            assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        await api.idle()
        await settled(redis_url, 1)
        records = await scripted.redis.xrange(RECORDS)
        said = "".join(capfd.readouterr()).encode() + b"".join(data for _, one in records for data in one.values())
        assert len(said) > 100
        assert b"quixotic" not in said
        assert str(logprob_of(ids_of("q")[0], 5).logprob).encode() not in said

    with_api(settings, redis_url, work, worker={"text": "quixotic"})
