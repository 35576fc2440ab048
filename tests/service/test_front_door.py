"""What comes before a request is one: heads, bodies, sizes and names that nobody should trust."""

import asyncio
import http.client
import json
import time

import pytest

from service.login import dashboard_url, host_of
from service.text import Text, TextTooLongError
from service.wire.errors import ApiError
from service.wire.parameters import parse
from service.wire.requests import ChatRequest
from tests.service.conftest import settled
from tests.service.scripted import MODEL, TEMPLATE, TOKENIZER
from tests.service.test_wire import CHAT, HELLO, PROMPT, TEXT, with_api

EMPTY = {"role": "user", "content": ""}
AMPLIFIER = "{% for m in messages %}{{ m.content * 1000 }}{% endfor %}"


async def raw(api, *pieces: bytes) -> tuple[int, dict, bytes]:
    """(status, error, the answer's head) of bytes sent as they are."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        body = await asyncio.wait_for(reader.read(), 10)
        return int(head.split()[1]), json.loads(body)["error"], head
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [EMPTY] * 110_000}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 3_000_000}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 110_000}]}),
        (TEXT, {"prompt": "a" * 3_000_000}),
        (TEXT, {"prompt": "\U0001f30d" * 100_000}),
        (TEXT, {"prompt": [1] * 1_000_000}),
        (TEXT, {"prompt": [[1] * 1_000_000]}),
    ],
)
def test_what_cannot_fit_is_refused_before_any_tokenizer_sees_it(settings, keyring, redis_url, monkeypatch, path, body):
    async def work(api, scripted):
        text, asked = api.dispatch.workers.model(MODEL).text, []
        monkeypatch.setattr(text, "_tokenizer", asked)  # whatever is asked of a list would fail
        async with api.client(keyring.key()) as client:
            answer = await client.post(path, json={"model": MODEL, "max_tokens": 1, **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == ("messages" if path == CHAT else "prompt")
        assert scripted.seen == []

    with_api(settings, redis_url, work)


def test_what_a_template_makes_of_little_is_bounded_too():
    with pytest.raises(TextTooLongError):
        Text(TOKENIZER.to_str(), AMPLIFIER, {}).encode_chat([{"role": "user", "content": "a" * 100}], most=1000)


@pytest.mark.parametrize("text", ["", "a", "é" * 50, "\U0001f30d" * 25, "<|im_start|>" * 100, " " * 100, "\ud7ff"])
def test_no_text_that_fits_is_ever_refused_by_its_size(text):
    ids = TOKENIZER.encode(text).ids
    assert Text(TOKENIZER.to_str(), TEMPLATE, {}).encode(text, most=len(ids)) == ids


def test_a_body_that_never_comes_ends_with_408_and_a_closed_connection(settings, keyring, redis_url):
    async def work(api, scripted):
        key = keyring.key()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        for rest in ("Content-Length: 50\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"):
            status, error, _ = await raw(api, (head + rest).encode())
            assert (status, error["code"]) == (408, "request_timeout")
        assert scripted.seen == []

    with_api(settings, redis_url, work, body_timeout_s=0.2)


def test_the_clock_of_a_request_starts_when_its_body_is_there(settings, keyring, redis_url):
    async def work(api, _):
        sent = []

        async def slowly():
            body = json.dumps(PROMPT).encode()
            yield body[:5]
            await asyncio.sleep(0.3)
            sent.append(time.time())
            yield body[5:]

        async with api.client(keyring.key()) as client:
            answer = await client.post(TEXT, content=slowly(), headers={"content-type": "application/json"})
        assert answer.status_code == 200
        (settlement,) = await settled(redis_url, 1)
        assert settlement.origin.created_at >= sent[0]

    with_api(settings, redis_url, work)


@pytest.mark.parametrize(
    "head",
    [
        [b"X: " + b"a" * 5_000_000 + b"\r\n"],
        [b"X: a\r\n"] * 100_000,
        [b"X" * 70_000 + b": a\r\n"],
    ],
    ids=["one", "many", "name"],
)
@pytest.mark.parametrize("ends", [b"\r\n", b"X: a"], ids=["whole", "unfinished"])
def test_heads_have_a_bound(settings, redis_url, head, ends):
    async def work(api, _):
        # Only as much as a peer would send that listens: what follows the refusal is reset.
        sent = (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"".join(head))[:80_000] + b"\r\n" + ends
        status, error, _ = await raw(api, sent)
        assert (status, error["code"]) == (431, "headers_too_large")

    with_api(settings, redis_url, work)


@pytest.mark.parametrize(
    "sent",
    [
        b"RUBBISH\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_openais_error_body(settings, redis_url, sent):
    async def work(api, _):
        status, error, _ = await raw(api, sent)
        assert (status, error["code"]) == (400, "invalid_http")
        assert set(error) == {"message", "type", "param", "code"}

    with_api(settings, redis_url, work)


def test_a_client_that_sends_all_before_it_reads_sees_why_its_body_was_refused(settings, keyring, redis_url):
    async def work(api, _):
        key = keyring.key()

        def post() -> int:
            connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=20)
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json", "connection": "close"}
            connection.request("POST", CHAT, json.dumps({**HELLO, "user": "x" * 8_000_000}), headers)
            return connection.getresponse().status

        assert await asyncio.to_thread(post) == 413

    with_api(settings, redis_url, work)


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("costs.example:8080", "costs.example"),
        ("127.0.0.1", "127.0.0.1"),
        ("[::1]:8080", "::1"),
        ("[::1", None),
        ("[::g]", None),
        ("", None),
        ("a b", None),
        ("user@evil.example", None),
        ("evil.example/x", None),
        ("evil.example\\x", None),
        ("-a", None),
        ("a" * 64, None),
        (".".join(["a"] * 200), None),
        ("x:port", None),
    ],
)
def test_only_a_host_name_or_an_ip_can_take_the_place_of_a_loopback_name(header, host):
    assert host_of(header) == host
    configured = "http://127.0.0.1:8501"
    shown = f"[{host}]" if host and ":" in host else host
    assert dashboard_url(configured, host_of(header)) == (f"http://{shown}:8501" if host else configured)


@pytest.mark.parametrize(
    "name",
    [
        "SECRET text",
        "S" * 65,
        "SECRETé",
        "x - at `$.SECRET",
        "x field `SECRET",
        "SECRET`",
        "`SECRET` - at `$.a",
        "1SECRET",
    ],
)
@pytest.mark.parametrize("wrap", [lambda n: {n: 1}, lambda n: {"stream_options": {n: 1}}], ids=["root", "within"])
def test_names_that_do_not_look_like_one_are_never_repeated(name, wrap):
    with pytest.raises(ApiError) as caught:
        parse(json.dumps({**HELLO, **wrap(name)}).encode(), ChatRequest)
    detail = caught.value.body.error
    assert (detail.code, detail.param) == ("unknown_parameter", None)
    assert "S" not in detail.message


def test_a_value_that_looks_like_a_path_is_not_repeated():
    role = {"role": "x - at `$.SECRET", "content": ""}
    with pytest.raises(ApiError) as caught:
        parse(json.dumps({**HELLO, "messages": [role]}).encode(), ChatRequest)
    assert caught.value.body.error.param == "messages[0].role"
    assert "SECRET" not in caught.value.body.error.message
