"""Admission against a plain statement of its rule: exact windows, all or nothing, nothing held by the dead."""

import asyncio
import subprocess
import sys
import textwrap
import time
import uuid
from dataclasses import dataclass, field

import msgspec
import redis as sync_redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from engine.keys import inbox_key, lease_key
from engine.protocol import Job, Origin, Sampling
from service.admission import Admission, Candidate, Cause, Granted, Refused, Scope, beginning
from tests.service.conftest import NOTHING, held

LEASE_S = 5
ROOMY = [Candidate("w", 1 << 40)]


def job(prompt: int = 1, max_tokens: int = 1, *, request_id: uuid.UUID | None = None, attempt: int = 1) -> Job:
    origin = Origin(
        tenant_id=uuid.uuid4(),
        api_key_id=uuid.uuid4(),
        model="m",
        deployment="d",
        revision="r",
        endpoint="e",
        stream=False,
        boot_id="b",
        created_at=0,
        deadline=0,
    )
    return Job(
        request_id=request_id or uuid.uuid4(),
        attempt=attempt,
        origin=origin,
        prompt=[0] * prompt,
        sampling=Sampling(max_tokens=max_tokens),
    )


def run(redis_url, work, *, workers=("w",), clock=None):
    """``work(admission, connection)`` with living workers, in an event loop of its own."""

    async def main():
        async with Redis.from_url(redis_url) as connection:
            for worker in workers:
                await connection.set(lease_key(worker), b"")
            return await work(Admission(connection, LEASE_S, clock=clock), connection)

    return asyncio.run(main())


@dataclass
class Rule:
    """What ``service.admission`` promises of one scope, said once more without Redis."""

    scope: Scope
    window: dict[uuid.UUID, tuple[int, int]] = field(default_factory=dict)  # id: (time, tokens)
    running: dict[uuid.UUID, int] = field(default_factory=dict)  # id: end of its lease

    def allows(self, now: int, tokens: int) -> bool:
        recent = [taken for at, taken in self.window.values() if at > now - 60_000]
        alive = [end for end in self.running.values() if end > now]
        scope = self.scope
        return (
            (scope.rpm is None or len(recent) < scope.rpm)
            and (scope.tpm is None or sum(recent) + tokens <= scope.tpm)
            and (scope.concurrency is None or len(alive) < scope.concurrency)
        )

    def take(self, request_id: uuid.UUID, now: int, tokens: int) -> None:
        self.window[request_id] = (now, tokens)
        self.running[request_id] = now + LEASE_S * 1000

    def release(self, request_id: uuid.UUID, used: int) -> None:
        if self.running.pop(request_id, None) is not None:
            self.window[request_id] = (self.window[request_id][0], used)

    def expire(self, now: int) -> None:
        for request_id in [i for i, end in self.running.items() if end <= now]:
            self.release(request_id, 0)


limits = st.none() | st.integers(1, 4)
scopes = st.tuples(
    st.builds(Scope, name=st.just("tenant:t"), rpm=limits, tpm=st.none() | st.integers(10, 60), concurrency=limits),
    st.builds(Scope, name=st.just("key:k"), rpm=limits, tpm=st.none() | st.integers(10, 60), concurrency=limits),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(1, 20)),
        st.tuples(st.just("release"), st.integers(0, 20)),
        st.tuples(st.just("renew"), st.just(0)),
        st.tuples(st.just("wait"), st.sampled_from([1, 999, 2500, 5000, 20_000, 59_000, 60_000])),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scopes, steps)
def test_any_sequence_is_decided_as_the_rule_says(redis_url, scopes, steps):
    with sync_redis.Redis.from_url(redis_url) as connection:
        connection.flushall()
    now = int(time.time() * 1000)  # of this moment: windows expire by the server's own clock

    async def work(admission, _):
        nonlocal now
        rules, running = [Rule(scope) for scope in scopes], []
        for step, number in steps:
            if step == "wait":
                now += number
            if step == "release" and running:
                request = running.pop(0)
                await admission.release(request, used_tokens=number)
                for rule in rules:
                    rule.release(request, number)
            if step == "renew":
                await admission.renew(running)
                for rule in rules:
                    rule.expire(now)
                    rule.running = dict.fromkeys(rule.running, now + LEASE_S * 1000)
            if step == "admit":
                for rule in rules:
                    rule.expire(now)
                expected = all(rule.allows(now, number) for rule in rules)
                asked = job(number - 1, 1)
                answer = await admission.admit(asked, scopes, ROOMY)
                assert isinstance(answer, Granted) is expected, (answer, rules)
                if isinstance(answer, Granted):
                    running.append(asked.request_id)
                    for rule in rules:
                        rule.take(asked.request_id, now, number)
                elif answer.retry_ms and answer.cause in {Cause.REQUESTS, Cause.TOKENS}:
                    blamed = rules[answer.scope]
                    at = now + answer.retry_ms
                    blamed.running, kept = {}, blamed.running
                    assert blamed.allows(at, number), "after retry_ms this limit has room"
                    assert not blamed.allows(at - 1, number), "and not before"
                    blamed.running = kept

    run(redis_url, work, clock=lambda: now)


def test_a_refused_call_leaves_no_trace(redis_url):
    scopes = (Scope(name="tenant:t", rpm=5, tpm=100), Scope(name="key:k", rpm=1))

    async def work(admission, connection):
        first = await admission.admit(job(10, 10), scopes, ROOMY)
        before = await dump(connection)
        for _ in range(5):
            refused = await admission.admit(job(10, 10), scopes, ROOMY)
            assert isinstance(refused, Refused)
            assert (refused.cause, refused.scope) == (Cause.REQUESTS, 1)
        assert await dump(connection) == before
        assert isinstance(first, Granted)

    run(redis_url, work)


def test_a_request_larger_than_its_limit_is_told_that_waiting_does_not_help(redis_url):
    async def work(admission, _):
        refused = await admission.admit(job(90, 20), (Scope(name="key:k", tpm=100),), ROOMY)
        assert (refused.cause, refused.retry_ms) == (Cause.TOKENS, 0)

    run(redis_url, work)


def test_asking_again_after_a_lost_reply_admits_once(redis_url):
    scopes = (Scope(name="key:k", rpm=2, concurrency=2),)

    async def work(admission, connection):
        asked = job()
        answers = [await admission.admit(asked, scopes, ROOMY) for _ in range(3)]
        assert {answer.worker for answer in answers} == {"w"}
        assert answers[-1].used[0].requests == 1
        assert await connection.xlen(inbox_key("w")) == 1
        await admission.release(asked.request_id, used_tokens=2)
        await admission.release(asked.request_id, used_tokens=2)
        assert held(redis_url) == NOTHING

    run(redis_url, work)


def test_a_later_attempt_moves_what_is_held_and_is_not_limited(redis_url):
    scopes = (Scope(name="key:k", rpm=1, concurrency=1),)

    async def work(admission, connection):
        asked = job(10, 10)
        await admission.admit(asked, scopes, [Candidate("w", 100)])
        again = job(10, 10, request_id=asked.request_id, attempt=2)
        moved = await admission.admit(again, scopes, [Candidate("v", 100)])
        assert moved.worker == "v"
        assert await connection.get("pw:load:w") is None
        assert int(await connection.get("pw:load:v")) == 20
        await connection.flushall()
        await connection.set(lease_key("v"), b"")
        third = job(10, 10, request_id=asked.request_id, attempt=3)
        assert (await admission.admit(third, scopes, [Candidate("v", 100)])).worker == "v"
        assert held(redis_url) == {"slots": 1, "load": 20, "requests": 1, "leases": 1}

    run(redis_url, work, workers=("w", "v"))


def test_a_given_up_admission_cannot_happen_any_more_even_if_it_is_still_on_its_way(redis_url):
    async def work(admission, connection):
        late, early = job(), job()
        assert await admission.forget(late.request_id) == ""
        answer = await admission.admit(late, (), ROOMY)
        assert answer.cause is Cause.FORGOTTEN
        await admission.admit(early, (), ROOMY)
        assert await admission.forget(early.request_id) == "w"
        assert await connection.xlen(inbox_key("w")) == 1
        assert held(redis_url)["slots"] == 0

    run(redis_url, work)


def test_the_living_worker_with_the_least_to_do_gets_the_job(redis_url):
    async def work(admission, _):
        two = [Candidate("dead", 100), Candidate("a", 100), Candidate("b", 100)]
        chosen = [(await admission.admit(job(10, size), (), two)).worker for size in (50, 20, 20, 20)]
        assert chosen == ["a", "b", "b", "a"]
        full = await admission.admit(job(10, 40), (), two)
        assert full.cause is Cause.OVERLOADED
        assert (await admission.admit(job(), (), [Candidate("dead", 100)])).cause is Cause.NO_WORKER
        big = await admission.admit(job(1000, 1), (), [Candidate("idle", 100)])
        assert big.worker == "idle", "an idle worker takes a request of any size"

    run(redis_url, work, workers=("a", "b", "idle"))


def test_prompts_that_begin_alike_go_to_one_worker_until_it_is_a_prompt_busier(redis_url):
    """Not those of another tenant, and not to a worker that is gone or full."""
    tenant = uuid.uuid4()

    def chat(own: int, *, of: uuid.UUID = tenant, salt: str = "", begins: int = 5) -> Job:
        plain = job(164, 36)
        origin = msgspec.structs.replace(plain.origin, tenant_id=of)
        prompt = [begins] * 100 + [own] * 64
        return msgspec.structs.replace(plain, origin=origin, prompt=prompt, cache_salt=salt)

    async def work(admission, connection):
        both = [Candidate("a", 2000), Candidate("b", 2000)]

        async def sent(asked: Job, candidates=both) -> str:
            answer = await admission.admit(asked, [], candidates)
            assert isinstance(answer, Granted)
            return answer.worker

        first = chat(1)
        home = await sent(first)
        other = "b" if home == "a" else "a"
        await admission.release(first.request_id, used_tokens=0)
        held = [chat(2), chat(3)]
        assert await sent(held[0]) == home
        assert await sent(held[1]) == other, "200 tokens busier, the prompt has 164"
        assert await sent(chat(4)) == other, "it has seen the beginning now, and is no busier"
        assert await sent(chat(5)) == home
        for _ in range(8):
            await sent(chat(6, of=uuid.uuid4(), begins=7))
        loads = [int(await connection.get(f"pw:load:{worker}")) for worker in ("a", "b")]
        assert loads == [1200, 1200], "strangers are spread by load"
        friends = [chat(7, of=uuid.uuid4(), salt="all"), chat(8, of=uuid.uuid4(), salt="all")]
        where = await sent(friends[0])
        await admission.release(friends[0].request_id, used_tokens=0)
        assert await sent(friends[1]) == where
        rest = "b" if where == "a" else "a"
        full = [Candidate(where, 1), Candidate(rest, 2000)]
        assert await sent(chat(9, of=uuid.uuid4(), salt="all"), full) == rest
        await connection.delete(lease_key(rest))
        assert await sent(chat(9, of=uuid.uuid4(), salt="all")) == where
        assert await connection.hlen("pw:beginnings") <= 13

    run(redis_url, work, workers=("a", "b"))


def test_what_is_remembered_of_beginnings_is_bounded():
    names = {beginning(job(64, request_id=None))[:4] for _ in range(20)}
    assert all(len(name) == 4 for name in names), "65,536 fields at most, whoever asks what"
    assert beginning(job(63)) == ""


def test_what_a_dead_owner_held_is_given_back_when_its_lease_ends(redis_url):
    now = int(time.time() * 1000)  # of this moment: windows expire by the server's own clock
    scopes = (Scope(name="key:k", concurrency=1, tpm=100),)

    async def work(admission, _):
        nonlocal now
        await admission.admit(job(40, 40), scopes, ROOMY)
        now += LEASE_S * 1000 - 1
        assert (await admission.admit(job(40, 40), scopes, ROOMY)).cause is Cause.TOKENS
        now += 1
        second = job(40, 40)
        assert isinstance(await admission.admit(second, scopes, ROOMY), Granted)
        now += LEASE_S * 1000
        assert await admission.renew([second.request_id]) == [second.request_id]
        assert held(redis_url) == NOTHING

    run(redis_url, work, clock=lambda: now)


def test_windows_of_a_key_that_is_not_used_vanish(redis_url):
    async def work(admission, connection):
        asked = job()
        await admission.admit(asked, (Scope(name="key:k", rpm=5, tpm=50),), ROOMY)
        await admission.release(asked.request_id, used_tokens=2)
        ttls = [await connection.pttl(key) async for key in connection.scan_iter("pw:window:*")]
        assert len(ttls) == 2
        assert all(0 < ttl <= 120_000 for ttl in ttls)

    run(redis_url, work)


RACE = textwrap.dedent("""
    import asyncio, sys
    from redis.asyncio import Redis
    from service.admission import Admission, Granted, Scope
    from tests.service.test_admission import ROOMY, job

    async def main():
        scopes = (Scope(name="tenant:t", rpm=100), Scope(name="key:" + sys.argv[2], tpm=2 * 37))
        async with Redis.from_url(sys.argv[1]) as connection:
            admission = Admission(connection, 5)
            print("ready", flush=True)
            sys.stdin.readline()
            answers = []
            for _ in range(20):
                answers += await asyncio.gather(*[admission.admit(job(), scopes, ROOMY) for _ in range(10)])
            print(sum(isinstance(a, Granted) for a in answers), flush=True)

    asyncio.run(main())
""")


def race(redis_url, keys):
    """Admissions granted to each of several processes that ask 200 times at once."""
    with sync_redis.Redis.from_url(redis_url) as connection:
        connection.set(lease_key("w"), b"")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, redis_url, key], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for key in keys
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    return [int(process.communicate()[0]) for process in processes]


def test_three_processes_together_get_exactly_the_limit(redis_url):
    assert sum(race(redis_url, ["same"] * 3)) == 37
    assert held(redis_url)["slots"] == 2 * 37
    with sync_redis.Redis.from_url(redis_url) as connection:
        connection.flushall()
    assert race(redis_url, ["a", "b", "c"]) != [37, 37, 37], "the tenant's 100 is less than three times 37"
    with sync_redis.Redis.from_url(redis_url) as connection:
        assert connection.zcard("pw:window:tenant:t") == 100


async def dump(connection):
    return {key: await connection.dump(key) async for key in connection.scan_iter("pw:*")}
