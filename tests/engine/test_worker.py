"""`python -m engine.worker` as a process, with the real model and a real Valkey, driven by hand as an owner would."""

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import pytest

from engine.keys import inbox_key, incumbent_key, lease_key, tokenizer_key
from engine.meter import unaccounted_ns
from engine.protocol import Abort, AbortReason, FinishReason, Job, Outcome, WorkerCard, WorkerState
from service.home.children import Guard
from service.home.ports import free_port
from service.home.valkey import Valkey
from tests.engine.owner import Owner, check_identities, eventually
from tests.engine.world import TENANT_B, job, prompt_of

NAME = "test-host/worker-0"
START_S = 90.0  # the machine may be busy


@dataclass
class Process:
    child: subprocess.Popen[bytes]
    log: Path

    def lines(self) -> str:
        return self.log.read_text()

    def wait(self) -> int:
        return self.child.wait(30)


@contextmanager
def worker(url: str, model: Path | str, folder: Path, **settings: str) -> Iterator[Process]:
    folder.mkdir(exist_ok=True)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("PENNYWEIGHT_", "OTEL_"))},
        "PENNYWEIGHT_REDIS_URL": url,
        "PENNYWEIGHT_MODEL": str(model),
        "PENNYWEIGHT_MODEL_NAME": "smollm2",
        "PENNYWEIGHT_WORKER_NAME": NAME,
        "PENNYWEIGHT_SPOOL": str(folder / "spool"),
        "PENNYWEIGHT_KV_TOKENS": "2048",
        "PENNYWEIGHT_DRAIN_S": "20",
        **{f"PENNYWEIGHT_{name}": value for name, value in settings.items()},
    }
    log = folder / f"{secrets.token_hex(4)}.log"
    with log.open("wb") as stderr:
        child = subprocess.Popen([sys.executable, "-m", "engine.worker"], env=environment, stderr=stderr)
    try:
        yield Process(child, log)
    finally:
        child.kill()
        child.wait()


def ready(owner: Owner, process: Process) -> WorkerCard:
    """The card of a worker that is ready and alive."""

    def look() -> WorkerCard | None:
        assert process.child.poll() is None, process.lines()
        return next(
            (c for c in owner.cards() if c.state is WorkerState.READY and owner.redis.exists(lease_key(c.worker))), None
        )

    return eventually(look, within=START_S)


def test_a_worker_says_what_it_is_serves_and_drains(redis_url: str, smollm2_gguf: Path, tmp_path: Path) -> None:
    owner = Owner(redis_url)
    with worker(redis_url, smollm2_gguf, tmp_path) as process:
        card = ready(owner, process)
        assert (card.model, card.deployment, card.name) == ("smollm2", "smollm2", NAME)
        assert (card.kv_tokens, card.context_length, card.vocab_size) == (2048, 8192, 49152)
        assert card.device_kind == "cpu"
        assert "assistant" in card.chat_template
        assert owner.redis.get(incumbent_key(NAME)) == card.worker.encode()
        assert b'"vocab"' in owner.redis.get(tokenizer_key(card.revision))

        long, short = job(prompt_of(1000), 4), job(prompt_of(20), 4, tenant=TENANT_B)
        streams = [job(prompt_of(10 + n), 8, tenant=TENANT_B if n % 2 else UUID(int=9)) for n in range(3)]
        owner.send(card.worker, long, short, *streams)
        gone = job(prompt_of(7), 500)
        owner.send(card.worker, gone)
        eventually(lambda: len(owner.tokens(gone)) > 3)
        owner.send(card.worker, Abort(request_id=gone.request_id, attempt=1, reason=AbortReason.CLIENT_GONE))
        for each in (long, short, *streams):
            eventually(lambda each=each: owner.finished(each) is FinishReason.LENGTH)
        assert eventually(lambda: owner.finished(gone)) is FinishReason.CANCELLED
        assert owner.report(long).used_ns >= 5 * owner.report(short).used_ns

        process.child.send_signal(signal.SIGTERM)
        assert process.wait() == 0, process.lines()
    assert not owner.redis.exists(lease_key(card.worker), incumbent_key(NAME), inbox_key(card.worker))
    assert owner.cards() == []
    intervals = owner.intervals(card.worker)
    assert intervals[-1].last
    check_identities(intervals, owner.reports())
    assert intervals[0].loading_ns > 0
    assert sum(interval.mixed_tenant_steps for interval in intervals) > 0
    printed = [int(ns) for ns in re.findall(r'"unaccounted_ns": (\d+)', process.lines())]
    assert printed == [unaccounted_ns(interval) for interval in intervals]


def test_after_kill_9_the_next_boot_takes_over_and_completions_go_on_without_a_repeat(
    redis_url: str, smollm2_gguf: Path, tmp_path: Path
) -> None:
    owner = Owner(redis_url)
    jobs = [job(prompt_of(9 + n), 24) for n in range(5)]
    with worker(redis_url, smollm2_gguf, tmp_path) as process:
        first = ready(owner, process)
        alone = job(jobs[0].prompt, 24)
        owner.send(first.worker, alone)
        eventually(lambda: owner.finished(alone))
        owner.send(first.worker, *jobs)
        eventually(lambda: all(len(owner.tokens(each)) > 5 for each in jobs))
        process.child.kill()
    with worker(redis_url, smollm2_gguf, tmp_path) as process:
        second = eventually(lambda: [c for c in owner.cards() if c.worker != first.worker], within=START_S)[0]
        assert not owner.redis.exists(lease_key(first.worker)), "the successor removes it before it loads its model"
        second = ready(owner, process)
        assert [card.worker for card in owner.cards()] == [second.worker]
        resumed = [_next_attempt(each, owner.tokens(each)) for each in jobs]
        owner.send(second.worker, *resumed)
        for each in resumed:
            eventually(lambda each=each: owner.finished(each) is FinishReason.LENGTH)
            assert len(owner.tokens(each)) == 24
        assert owner.tokens(resumed[0]) == owner.tokens(alone)
        assert owner.report(resumed[0]).generated_tokens == 24 - len(resumed[0].generated[0])
        assert owner.report(alone).outcome is Outcome.COMPLETED


def _next_attempt(sent: Job, known: list[int]) -> Job:
    return job(
        sent.prompt, sent.sampling.max_tokens, request_id=sent.request_id, attempt=sent.attempt + 1, generated=known
    )


@pytest.fixture
def own_valkey(tmp_path_factory: pytest.TempPathFactory, guard: Guard) -> Iterator[Valkey]:
    """One that may be stopped; it keeps its data on disk."""
    folder = tmp_path_factory.mktemp("valkey")
    server = Valkey(folder, secrets.token_hex(8), free_port(), log=folder / "log", guard=guard)
    server.start(print)
    yield server
    server.stop()


def test_while_redis_is_away_the_worker_pauses_and_then_says_all_it_had_to_say(
    own_valkey: Valkey, smollm2_gguf: Path, tmp_path: Path
) -> None:
    owner = Owner(own_valkey.url())
    with worker(own_valkey.url(), smollm2_gguf, tmp_path) as process:
        card = ready(owner, process)
        sent = [job(prompt_of(10 + n), 40) for n in range(2)]
        owner.send(card.worker, *sent)
        eventually(lambda: all(len(owner.tokens(each)) > 2 for each in sent))
        own_valkey.stop()
        time.sleep(2)
        own_valkey.start(print)
        for each in sent:
            eventually(lambda each=each: owner.finished(each) is FinishReason.LENGTH)
            assert len(owner.tokens(each)) == 40
        process.child.send_signal(signal.SIGTERM)
        assert process.wait() == 0, process.lines()
    assert process.lines().count("redis is away") == 1
    assert process.lines().count("redis is back") == 1
    intervals = owner.intervals(card.worker)
    check_identities(intervals, owner.reports())
    assert sum(interval.overhead_ns for interval in intervals) > 1_500_000_000


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"MODEL": "/no/such/model.gguf"}, "/no/such/model.gguf"),
        ({"MODEL": ""}, "PENNYWEIGHT_MODEL is not set"),
        ({"REDIS_URL": "http://example"}, "PENNYWEIGHT_REDIS_URL"),
        ({"MAX_BATCH": "0"}, "PENNYWEIGHT_MAX_BATCH"),
        ({"MAX_BATCH": "many"}, "PENNYWEIGHT_MAX_BATCH"),
        ({"STEP_TOKENS": "8", "MAX_BATCH": "9"}, "PENNYWEIGHT_STEP_TOKENS"),
        ({"LEASE_S": "-1"}, "PENNYWEIGHT_LEASE_S"),
        ({"SPOOL": "/dev/null"}, "/dev/null"),
    ],
)
def test_what_makes_a_start_impossible_is_said_in_one_line(
    settings: dict[str, str], says: str, redis_url: str, tmp_path: Path
) -> None:
    with worker(redis_url, tmp_path / "model.gguf", tmp_path, **settings) as process:
        assert process.wait() == 2
    (line,) = process.lines().strip().splitlines()
    assert says in line
    assert "Traceback" not in line
    assert Owner(redis_url).cards() == [], "nothing half-done stays"
