"""The worker's loop over a real Valkey, with the model of tests.engine.world."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
from prometheus_client import CollectorRegistry

from engine.config import EngineConfig
from engine.core import Engine
from engine.keys import DATA, WORKERS, events_key, inbox_key, incumbent_key, lease_key, tokenizer_key
from engine.loop import Exit, Loop, Stop
from engine.meter import Identity, Meter, unaccounted_ns
from engine.metrics import Metrics
from engine.protocol import Abort, AbortReason, FinishReason, Job, Outcome, WorkerCard, WorkerState, pack, unpack_events
from engine.registration import Registration
from engine.spool import RecordProducer
from engine.timeline import Span, Timeline
from tests.engine.owner import Owner, check_identities, eventually
from tests.engine.world import Clock, HashRunner, completion_of, job, limits


class SlowRunner(HashRunner):
    """Steps that take real time, so that something can happen between them."""

    step_s = 0.0

    def execute(self, plan):
        started = time.monotonic_ns()
        time.sleep(self.step_s)
        result = super().execute(plan)
        return type(result)(drawn=result.drawn, device_ns=time.monotonic_ns() - started, rows=result.rows)


@dataclass
class Running:
    """A loop in a thread, and its owner."""

    url: str
    worker: str
    runner: SlowRunner
    engine: Engine
    stop: Stop
    registration: Registration
    registry: CollectorRegistry
    thread: threading.Thread
    exits: list[Exit | BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.owner = Owner(self.url)
        self.redis = self.owner.redis

    def send(self, *messages: Job | Abort) -> None:
        self.owner.send(self.worker, *messages)

    def card(self) -> WorkerCard | None:
        return next((card for card in self.owner.cards() if card.worker == self.worker), None)

    def ended(self) -> Exit | BaseException:
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.exits[0]


def card_of(worker: str) -> WorkerCard:
    return WorkerCard(
        worker=worker,
        name="host/worker-0",
        state=WorkerState.LOADING,
        device="host/cpu",
        device_kind="cpu",
        deployment="m",
        model="m",
        revision="rev-1",
        context_length=64,
        default_max_tokens=16,
        max_batch=4,
        kv_tokens=64,
        max_outstanding_tokens=256,
        eos_token_ids=(0,),
        vocab_size=97,
    )


@contextmanager
def running(
    url: str,
    spool: Path,
    *,
    worker: str = "w1",
    step_s: float = 0.0,
    lease_s: float = 2.0,
    drain_s: float = 5.0,
    **knobs,
) -> Iterator[Running]:
    connection = redis.Redis.from_url(url, protocol=2, socket_timeout=2)
    registration = Registration(card_of(worker), lease_s=lease_s)
    registration.take_name(connection)
    registration.publish(connection, registration.card, b"{}")
    registration.become(WorkerState.READY)
    runner = SlowRunner(limits(num_blocks=64), Clock())
    runner.step_s = step_s
    identity = Identity(worker=worker, device="host/cpu", device_kind="cpu", deployment="m")
    config = EngineConfig(max_batch=4, step_tokens=8, **knobs)
    engine = Engine(runner, Meter(identity, Timeline(Span.OVERHEAD), fixed_rows=16), config)
    producer = RecordProducer(redis.Redis.from_url(url, protocol=2), spool, worker)
    producer.start(lambda payload: payload)
    registry, stop = CollectorRegistry(), Stop(drain_s)
    loop = Loop(
        connection=connection,
        engine=engine,
        registration=registration,
        records=producer,
        metrics=Metrics("m", "host/worker-0", registry),
        stop=stop,
        config=config,
        tracing=None,
    )

    def run() -> None:
        try:
            state.exits.append(loop.run())
        except BaseException as error:
            state.exits.append(error)
            raise

    thread = threading.Thread(target=run, daemon=True)
    state = Running(url, worker, runner, engine, stop, registration, registry, thread)
    thread.start()
    try:
        yield state
    finally:
        stop.ask()
        stop.ask()
        thread.join(10)
        producer.close(0.2)
    assert not thread.is_alive()


def test_a_job_comes_back_as_one_batch_of_events_per_step_and_a_report(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path) as worker:
        sent = job(20, 5)
        worker.send(sent)
        eventually(lambda: worker.owner.finished(sent))
        assert worker.owner.tokens(sent) == completion_of(sent.prompt, 5)
        assert worker.redis.xlen(events_key(Owner.boot)) == 5, "chunks that draw nothing say nothing"
        report = worker.owner.report(sent)
        assert (report.outcome, report.worker, report.generated_tokens) == (Outcome.COMPLETED, "w1", 5)
        assert 0 < report.queue_ns < 10**10
        eventually(lambda: worker.redis.xlen(inbox_key("w1")) == 0)


def test_the_wait_in_the_inbox_is_part_of_the_queue_time(redis_url: str, tmp_path: Path) -> None:
    sent = job(5, 1)
    redis.Redis.from_url(redis_url).xadd(inbox_key("w1"), {DATA: pack(sent)})
    time.sleep(0.3)
    with running(redis_url, tmp_path) as worker:
        assert worker.owner.report(sent).queue_ns >= 300_000_000


def test_each_owner_hears_of_its_own_requests_only(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path) as worker:
        mine, other = job(5, 3), job(5, 3, owner="api-2")
        worker.redis.set(lease_key("api-2"), "owner")
        worker.send(mine, other)
        eventually(lambda: worker.owner.finished(mine))
        worker.owner.report(other)
        batches = [unpack_events(f[DATA]) for _, f in worker.redis.xrange(events_key("api-2"))]
        assert {event.request_id for batch in batches for event in batch.events} == {other.request_id}
        assert {event.request_id for event in worker.owner.events()} == {mine.request_id}


def test_an_abort_takes_effect_within_two_steps(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path, step_s=0.02) as worker:
        sent = job(5, 50)
        worker.send(sent)
        eventually(lambda: worker.owner.tokens(sent))
        worker.send(Abort(request_id=sent.request_id, attempt=1, reason=AbortReason.CLIENT_GONE))
        steps = len(worker.runner.plans)
        eventually(lambda: worker.owner.finished(sent) is FinishReason.CANCELLED)
        assert len(worker.runner.plans) <= steps + 2
        assert worker.engine.scheduler.kv.usage == 0


def test_rubbish_in_the_inbox_is_skipped_and_the_next_job_runs(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path) as worker:
        for fields in ({DATA: b"\xff\x00nonsense"}, {b"x": b"y"}, {DATA: b""}, {DATA: pack(card_of("w9"))}):
            worker.redis.xadd(inbox_key("w1"), fields)
        worker.redis.xadd(inbox_key("w1"), {DATA: pack(job(5, 3))[:-20]})
        worker.redis.xadd(
            inbox_key("w1"),
            {DATA: pack(Abort(request_id=job().request_id, attempt=1, reason=AbortReason.CLIENT_GONE))},
        )
        sent = job(5, 3)
        worker.send(sent)
        eventually(lambda: worker.owner.finished(sent))


def test_a_lost_owners_attempts_end_and_the_others_go_on(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path, step_s=0.3) as worker:
        orphan, other = job(5, 50, owner="api-2"), job(5, 50)
        worker.send(orphan, other)
        report = worker.owner.report(orphan)
        assert (report.error, report.used_ns) == ("owner_lost", 0)
        assert report.wasted_ns["lost"] > 0
        assert worker.owner.finished(other) is None


def test_after_redis_lost_everything_card_lease_name_and_tokenizer_come_back(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path, lease_s=1.0) as worker:
        sent = job(5, 2)
        worker.send(sent)
        eventually(lambda: worker.owner.finished(sent))
        worker.redis.flushall()
        keys = (lease_key("w1"), incumbent_key("host/worker-0"), tokenizer_key("rev-1"), WORKERS)
        eventually(lambda: worker.redis.exists(*keys) == 4, within=5)
        assert worker.card().state is WorkerState.READY
        worker.owner.forget_events()
        again = job(5, 2)
        worker.send(again)
        eventually(lambda: worker.owner.finished(again))


def test_a_new_boot_takes_the_name_and_the_old_one_stops(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path / "a", step_s=0.02, lease_s=0.4) as old:
        sent = job(5, 50)
        old.send(sent)
        eventually(lambda: old.owner.tokens(sent))
        with running(redis_url, tmp_path / "b", worker="w2") as new:
            assert new.card() is not None
            assert old.ended() is Exit.REPLACED
            assert old.card() is None
            assert not old.redis.exists(lease_key("w1"))
            assert old.owner.report(sent).outcome is Outcome.SUPERSEDED
            assert new.redis.get(incumbent_key("host/worker-0")) == b"w2"
            again = job(5, 2)
            new.send(again)
            eventually(lambda: new.owner.finished(again))


def test_a_drain_finishes_what_was_taken_and_ends_with_the_last_interval(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path, step_s=0.02) as worker:
        sent = [job(5, 20) for _ in range(6)]
        worker.send(*sent)
        eventually(lambda: worker.owner.tokens(sent[0]))
        worker.stop.ask()
        eventually(lambda: worker.card().state is WorkerState.DRAINING)
        assert worker.ended() is Exit.DRAINED
        for each in sent:
            assert worker.owner.tokens(each) == completion_of(each.prompt, 20)
        eventually(lambda: worker.owner.intervals(worker.worker) and worker.owner.intervals(worker.worker)[-1].last)
        assert worker.owner.intervals(worker.worker)[-1].open_ns == 0


def test_what_a_drain_cannot_finish_goes_back_to_its_owner_as_waste(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path, step_s=0.05, drain_s=0.2) as worker:
        sent = job(5, 55)
        worker.send(sent)
        eventually(lambda: worker.owner.tokens(sent))
        worker.stop.ask()
        assert worker.ended() is Exit.DRAINED
        assert worker.owner.finished(sent) is None
        report = worker.owner.report(sent)
        assert (report.outcome, report.used_ns) == (Outcome.SUPERSEDED, 0)
        assert report.wasted_ns["superseded"] > 0


def test_a_step_that_raises_fails_its_attempts_and_the_worker_goes_on(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path) as worker:
        worker.runner.raises = [RuntimeError("device"), None]
        sent = job(5, 3)
        worker.send(sent)
        eventually(lambda: worker.owner.finished(sent) is FinishReason.FAILED)
        again = job(5, 3)
        worker.send(again)
        eventually(lambda: worker.owner.finished(again) is FinishReason.LENGTH)


def test_steps_that_keep_raising_end_the_worker_after_it_has_said_so(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path, max_failures=2) as worker:
        worker.runner.raises = [MemoryError()] * 5
        first, second = job(5, 3), job(5, 3)
        worker.send(first)
        eventually(lambda: worker.owner.finished(first) is FinishReason.FAILED)
        worker.send(second)
        assert worker.ended() is Exit.BROKEN
        assert worker.owner.finished(second) is FinishReason.FAILED
        assert worker.owner.report(second).error == "step_failed"


def test_a_real_run_closes_its_books_and_prints_what_is_unaccounted(
    redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(redis_url, tmp_path, step_s=0.001, interval_s=0.3) as worker:
        sent = [job(5 + number % 20, 12) for number in range(24)]
        for each in sent:
            worker.send(each)
            time.sleep(0.02)
        worker.send(Abort(request_id=sent[-1].request_id, attempt=1, reason=AbortReason.SUPERSEDED))
        for each in sent:
            worker.owner.report(each)
        time.sleep(0.6)
        worker.stop.ask()
        assert worker.ended() is Exit.DRAINED
        eventually(lambda: worker.owner.intervals(worker.worker) and worker.owner.intervals(worker.worker)[-1].last)
        intervals = worker.owner.intervals(worker.worker)
        reports = worker.owner.reports()
    assert len(intervals) >= 4
    check_identities(intervals, reports)
    assert any(interval.idle_ns > 0.9 * 0.3e9 for interval in intervals), "idle time has intervals too"
    unaccounted = sum(map(unaccounted_ns, intervals))
    assert unaccounted >= 0
    printed = [int(ns) for ns in re.findall(r"unaccounted_ns=(\d+)", capsys.readouterr().out)]
    assert sum(printed) == unaccounted


def test_metrics_count_what_happened(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path) as worker:
        sent = job(20, 5)
        worker.send(sent)
        worker.owner.report(sent)
        labels = {"model_name": "m", "engine": "host/worker-0"}

        def value(name: str, **more: str) -> float | None:
            return worker.registry.get_sample_value(name, {**labels, **more})

        assert value("vllm:prompt_tokens_total") == 20
        assert value("vllm:generation_tokens_total") == 5
        assert value("vllm:prefix_cache_queries_total") == 20
        assert value("vllm:prefix_cache_hits_total") == 0
        assert value("vllm:request_success_total", finished_reason="length") == 1
        assert value("vllm:inter_token_latency_seconds_count") == 4
        assert value("pennyweight_engine_steps_total") == 7
        assert value("vllm:num_requests_running") == 0
        assert value("pennyweight_engine_attempts_total", outcome="completed", error="") == 1
        assert value("pennyweight_engine_stalled_steps_total") == 0
