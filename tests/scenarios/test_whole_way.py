"""A request's whole way through a running system: what the client saw, what the row says and what it cost."""

import itertools
import json
import socket
import statistics
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.scenarios.conftest import System, eventually

WORDS = "The history of bread begins with grain and water. " * 120


def prompt_of(words: int) -> str:
    return " ".join(WORDS.split()[:words])


def stream_chat(system: System, *, key: str | None = None, **options):
    """(request id, texts with arrival times, usage) of one streamed chat."""
    arrivals: list[tuple[float, str]] = []
    usage = None
    options.setdefault("messages", [{"role": "user", "content": "Why is the sky blue?"}])
    raw = system.client(key).chat.completions.with_raw_response.create(
        model=system.model, stream=True, stream_options={"include_usage": True}, **options
    )
    for chunk in raw.parse():
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].delta.content:
            arrivals.append((time.monotonic(), chunk.choices[0].delta.content))
    return raw.headers["x-request-id"], arrivals, usage


def priced(row, price) -> Decimal:
    """The hand calculation."""
    uncached = row["prompt_tokens"] - row["cached_tokens"]
    cached_price = price["cached_input"] if price["cached_input"] is not None else price["input"]
    return (
        uncached * price["input"] + row["cached_tokens"] * cached_price + row["completion_tokens"] * price["output"]
    ) + (price["request"] or 0)


def test_a_streamed_chat_is_sensible_english_and_its_row_is_right(system: System):
    request_id, arrivals, usage = stream_chat(
        system, max_tokens=64, temperature=0, extra_body={"ignore_eos": True, "min_tokens": 64}
    )
    text = "".join(piece for _, piece in arrivals)
    assert sum(word in text.lower() for word in ("light", "sky", "blue", "the", "atmosphere")) >= 3, text
    assert usage.completion_tokens == 64
    assert len(arrivals) > 20
    first, last = arrivals[0][0], arrivals[-1][0]
    gaps = [b[0] - a[0] for a, b in itertools.pairwise(arrivals)]
    assert last - first > 10 * statistics.median(gaps), "the chunks came one by one"

    row = system.row(request_id)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (usage.prompt_tokens, usage.completion_tokens)
    assert (row["status"], row["generated_tokens"], row["delivered_tokens"]) == ("completed", 64, 64)
    (price,) = system.rows("SELECT * FROM prices WHERE id = %s", row["price_id"])
    assert row["price"] == priced(row, price) > 0
    assert row["cost"] > 0
    assert 0 <= row["queue_seconds"] <= row["ttft_seconds"] <= row["total_seconds"]


def test_the_same_prompt_and_seed_give_the_same_text_streamed_or_not(system: System):
    options = {"max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": 7}
    _, arrivals, usage = stream_chat(system, **options)
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    plain = system.client().chat.completions.create(model=system.model, messages=messages, **options)
    assert plain.choices[0].message.content == "".join(piece for _, piece in arrivals)
    assert plain.usage.completion_tokens == usage.completion_tokens


def test_many_streams_share_their_steps_across_tenants(system: System):
    other = system.new_key("neighbour")
    steps, mixed = "pennyweight_engine_steps_total", "pennyweight_engine_mixed_tenant_steps_total"
    before = system.metric(steps), system.metric(mixed)

    def one(n: int):
        content = f"Tell me story {n}. " + prompt_of(8 * (n % 6))
        return stream_chat(
            system,
            key=other if n % 2 else None,
            messages=[{"role": "user", "content": content}],
            max_tokens=16 + 4 * (n % 5),
            extra_body={"ignore_eos": True},
        )

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(one, range(32)))
    tokens = sum(usage.completion_tokens for _, _, usage in answers)
    assert system.metric(steps) - before[0] <= tokens / 8
    assert system.metric(mixed) > before[1]
    for request_id, _, usage in answers:
        row = system.row(request_id)
        assert (row["prompt_tokens"], row["completion_tokens"]) == (usage.prompt_tokens, usage.completion_tokens)
    ids = [request_id for request_id, _, _ in answers]
    assert system.rows("SELECT count(*) AS n FROM requests WHERE id = ANY(%s::uuid[])", ids)[0]["n"] == 32


def test_a_long_prefill_costs_many_times_a_short_one_in_the_same_run(system: System):
    vocabulary = list(range(1000, 2000))

    def one(prompt: list[int]):
        raw = system.client().completions.with_raw_response.create(model=system.model, prompt=prompt, max_tokens=1)
        return system.row(raw.headers["x-request-id"])["cost"]

    with ThreadPoolExecutor(2) as pool:
        long, short = pool.map(one, [vocabulary, vocabulary[:20]])
    assert long >= 5 * short


def test_the_books_of_the_device_close(system: System):
    stream_chat(system, max_tokens=8)
    output = eventually(lambda: "unaccounted" in (text := system.run("audit")) and text, within=30)
    assert "unaccounted" in output


class RawClient:
    """A client on a bare socket, to leave at an exact point."""

    def __init__(self, system: System, key: str, body: dict) -> None:
        url = urlsplit(system.api)
        self.socket = socket.create_connection((url.hostname, url.port), timeout=30)
        data = json.dumps({"model": system.model} | body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + data)
        self.received = b""

    def read_until(self, text: bytes) -> None:
        while text not in self.received:
            more = self.socket.recv(65536)
            assert more, self.received
            self.received += more

    def leave(self) -> None:
        self.socket.close()


def chat(content: str, **options) -> dict:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 200, "ignore_eos": True} | options


LEAVING = {
    "before the first chunk": (chat(prompt_of(900), stream=True), lambda client: time.sleep(0.15)),
    "mid-stream": (chat("hello", stream=True), lambda client: [client.read_until(b"data:"), time.sleep(0.5)]),
    "not streaming": (chat("hello"), lambda client: time.sleep(0.5)),
}


@pytest.mark.parametrize("point", LEAVING)
def test_a_client_that_leaves_is_settled_as_cancelled_and_frees_everything(system: System, point: str):
    body, wait = LEAVING[point]
    tenant = f"leaver-{uuid.uuid4().hex[:8]}"
    client = RawClient(system, system.new_key(tenant), body)
    wait(client)
    client.leave()
    sql = "SELECT r.* FROM requests r JOIN tenants t ON t.id = r.tenant_id WHERE t.name = %s"
    (row,) = eventually(lambda: system.rows(sql, tenant), within=5)
    assert row["status"] == "cancelled"
    assert row["delivered_tokens"] <= row["completion_tokens"] <= row["generated_tokens"] < 200
    eventually(lambda: nothing_held(system), within=2)
    assert len(system.rows(sql, tenant)) == 1


def test_a_client_that_leaves_at_once_is_not_admitted_or_is_cancelled(system: System):
    """Whichever of its goodbye and its admission is faster: never more than one row, never one that completed."""
    tenant = f"hasty-{uuid.uuid4().hex[:8]}"
    key = system.new_key(tenant)
    for _ in range(8):
        RawClient(system, key, chat("hello", stream=True)).leave()
    time.sleep(2)
    eventually(lambda: nothing_held(system), within=5)
    sql = "SELECT r.status FROM requests r JOIN tenants t ON t.id = r.tenant_id WHERE t.name = %s"
    statuses = [row["status"] for row in system.rows(sql, tenant)]
    assert len(statuses) <= 8
    assert set(statuses) <= {"cancelled"}


def nothing_held(system: System) -> bool:
    """No KV block, no slot and no request lease."""
    held = system.redis()
    slots = [key for key in held.scan_iter("pw:slots:*") if held.zcard(key)]
    return not slots and not held.zcard("pw:requests") and system.metric("vllm:kv_cache_usage_perc") == 0


def refused(system: System, **request) -> httpx.Response:
    request.setdefault("headers", {"Authorization": f"Bearer {system.bootstrap['api_key']}"})
    return httpx.post(f"{system.api}/v1/chat/completions", timeout=30, **request)


def test_bad_requests_get_openais_error_and_leave_nothing(system: System):
    revoked = system.new_key("revoked")
    sql = "SELECT k.id FROM api_keys k JOIN tenants t ON t.id = k.tenant_id WHERE t.name = 'revoked'"
    system.run("key", "revoke", str(system.rows(sql)[0]["id"]))
    time.sleep(2.5)  # longer than a key is believed
    good = chat("hi", model=system.model)
    rows = system.rows("SELECT count(*) AS n FROM requests")[0]["n"]
    cases = [
        (401, refused(system, json=good, headers={"Authorization": "Bearer pw-wrong"})),
        (401, refused(system, json=good, headers={})),
        (401, refused(system, json=good, headers={"Authorization": f"Bearer {revoked}"})),
        (404, refused(system, json=good | {"model": "no-such-model"})),
        (400, refused(system, content=b"{not json", headers=_json(system))),
        (400, refused(system, json=good | {"temperature": "hot"})),
        (400, refused(system, json=good | {"temperature": 9})),
        (400, refused(system, json=good | {"max_tokens": 0})),
        (400, refused(system, json=good | {"tools": [{"type": "function", "function": {"name": "f"}}]})),
        (400, refused(system, json=chat(" ".join(["word"] * 20_000), model=system.model))),
        (413, refused(system, content=b"x" * (10 << 20), headers=_json(system))),
        (415, refused(system, content=b"hello", headers=_json(system) | {"Content-Type": "text/plain"})),
    ]
    for status, response in cases:
        assert response.status_code == status, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert response.headers["x-request-id"]
    time.sleep(1)
    assert system.rows("SELECT count(*) AS n FROM requests")[0]["n"] == rows
    assert nothing_held(system)


def _json(system: System) -> dict[str, str]:
    return {"Authorization": f"Bearer {system.bootstrap['api_key']}", "Content-Type": "application/json"}


def test_a_finished_request_is_in_every_sum_within_fifteen_seconds(system: System):
    key = system.new_key("summed")
    request_id, _, usage = stream_chat(system, key=key, max_tokens=4)
    row = system.row(request_id, within=2)
    sql = """SELECT sum(u.requests) AS n, sum(u.completion_tokens) AS tokens, sum(u.price) AS price
             FROM usage_15m u JOIN tenants t ON t.id = u.tenant_id WHERE t.name = 'summed'"""
    total = eventually(lambda: (found := system.rows(sql)[0])["n"] and found, within=15)
    assert (total["n"], total["tokens"], total["price"]) == (1, usage.completion_tokens, row["price"])


def test_requests_per_minute_hold_over_all_processes(system: System):
    key = system.new_key("limited", rpm=5)
    outcomes = []
    lock = threading.Lock()

    def one(_: int) -> None:
        try:
            system.client(key).chat.completions.create(
                model=system.model, messages=[{"role": "user", "content": "hi"}], max_tokens=1
            )
            outcome = 200, False
        except openai.RateLimitError as error:
            outcome = error.status_code, int(error.response.headers["retry-after"]) > 0
        with lock:
            outcomes.append(outcome)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(20)))
    assert sorted(outcomes) == [(200, False)] * 5 + [(429, True)] * 15
