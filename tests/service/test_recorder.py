"""Records reach the books once, whatever dies or is wrong on the way."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from uuid import UUID, uuid4

import psycopg
import pytest
import redis
from sqlalchemy import text

from billing.database import open_database, transaction
from billing.ids import uuid7
from engine.keys import DATA, DEAD_LETTERS, PRODUCER, RECORDER_GROUP, RECORDS, SEQ, committed_key
from engine.protocol import AttemptReport, AttemptSeen, Interval, Origin, Outcome, Settlement, Status, pack
from engine.spool import RecordProducer
from service import recorder_metrics
from service.recorder import Recorder

WORKER, DEVICE = "worker-1", "host-a/cpu"


def origin() -> Origin:
    now = time.time()
    return Origin(
        tenant_id=uuid4(),
        api_key_id=uuid4(),
        model="smol",
        deployment="smol-1",
        revision="r1",
        endpoint="/v1/completions",
        stream=False,
        boot_id="boot-1",
        created_at=now,
        deadline=now + 600,
    )


def settlement(request_id: UUID | None = None, **changes) -> Settlement:
    seen = AttemptSeen(attempt=1, worker=WORKER, device=DEVICE, device_kind="cpu", device_ns=5)
    values = {
        "request_id": request_id or uuid7(),
        "origin": origin(),
        "status": Status.COMPLETED,
        "finish_reason": "stop",
        "winning_attempt": 1,
        "attempts": [seen],
        "prompt_tokens": 20,
        "generated_tokens": 7,
        "delivered_tokens": 7,
        "billed_tokens": 7,
        "total_ns": 1_000_000,
        "finished_at": time.time(),
    }
    return Settlement(**values | changes)


def report(request_id: UUID) -> AttemptReport:
    return AttemptReport(
        request_id=request_id,
        attempt=1,
        origin=origin(),
        worker=WORKER,
        device=DEVICE,
        device_kind="cpu",
        outcome=Outcome.COMPLETED,
        finished_at=time.time(),
        used_ns=10,
        interval=1,
    )


def interval(number: int) -> Interval:
    return Interval(
        worker=WORKER,
        device=DEVICE,
        device_kind="cpu",
        deployment="smol-1",
        number=number,
        started_at=time.time(),
        start_ns=(number - 1) * 10,
        end_ns=number * 10,
        busy_ns=10,
    )


def eventually(what, within: float = 20.0):
    deadline = time.monotonic() + within
    while not (answer := what()):
        assert time.monotonic() < deadline, f"still {answer!r}"
        time.sleep(0.02)
    return answer


@pytest.fixture(autouse=True)
def committed():
    """Here the recorder itself says what it committed, and nobody stands in for it."""


@pytest.fixture
def connection(redis_url):
    with redis.Redis.from_url(redis_url, socket_timeout=10) as connection:
        yield connection


@pytest.fixture
def database(database_url):
    engine = open_database(database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def recorder(connection, database) -> Recorder:
    made = Recorder(connection, database, name="recorder-1")
    assert made.turn() == 0, "the first look makes the group"
    return made


@contextmanager
def running(recorder: Recorder):
    thread = threading.Thread(target=recorder.run)
    thread.start()
    try:
        yield
    finally:
        recorder.stop()
        thread.join(timeout=20)
        assert not thread.is_alive()


def send(connection, *payloads: bytes, producer: str = "p") -> None:
    for number, payload in enumerate(payloads, start=1):
        connection.xadd(RECORDS, {PRODUCER: producer.encode(), SEQ: b"%d" % number, DATA: payload})


def count(database, table: str) -> int:
    with transaction(database) as books:
        return books.scalar(text(f"SELECT count(*) FROM {table}"))


def test_a_producer_forgets_what_the_books_have(recorder, connection, database, tmp_path):
    producer = RecordProducer(connection, tmp_path, "p")
    producer.start(revive=lambda held: held)
    with running(recorder):
        for number in range(1, 41):
            done = settlement()
            producer.put(pack(report(done.request_id)))
            producer.put(pack(done))
            producer.put(pack(interval(number)))
        eventually(lambda: producer.uncommitted() == 0)
    producer.close()
    assert (count(database, "requests"), count(database, "attempts"), count(database, "device_intervals")) == (40,) * 3
    assert count(database, "awaiting_report") == count(database, "awaiting_settlement") == 0
    assert connection.xlen(RECORDS) == 0
    assert list(tmp_path.iterdir()) == []


def dead_letters_counted() -> float:
    (metric,) = recorder_metrics.DEAD_LETTERS.collect()
    return sum(sample.value for sample in metric.samples if sample.name.endswith("_total"))


def test_poison_isolates_only_itself(recorder, connection, database):
    good = [pack(settlement()) for _ in range(30)]
    poison = [
        b"\xc1 no message pack",
        b"",
        pack(settlement(error_code="a\0b")),
        pack(settlement(UUID(int=uuid4().int))),  # an id that is not of version 7
        pack(settlement(UUID("00dc6acf-ac00-7000-8000-000000000000"))),  # of a time before these books
        pack(settlement(billed_tokens=8)),
        pack(settlement(prompt_tokens=1 << 40)),
        pack(settlement(finished_at=float("inf"))),
        pack(settlement(finished_at=1e300)),
    ]
    mixed = [*good[:10], *poison[:4], *good[10:20], *poison[4:], *good[20:]]
    before = dead_letters_counted()
    send(connection, *mixed)
    connection.xadd(RECORDS, {b"nobody": b"knows"})
    assert recorder.turn() == len(mixed) + 1
    assert count(database, "requests") == len(good)
    letters = [fields for _, fields in connection.xrange(DEAD_LETTERS)]
    assert sorted(letter.get(DATA, b"?") for letter in letters) == sorted([*poison, b"?"])
    assert {letter[b"error"] for letter in letters} >= {b"CheckViolation", b"DataError", b"ValueError"}
    assert dead_letters_counted() - before == len(letters)
    assert connection.xlen(RECORDS) == connection.xpending(RECORDS, RECORDER_GROUP)["pending"] == 0
    assert len(connection.lrange(committed_key("p"), 0, -1)) == len(mixed), "nobody sends poison for ever"


def test_two_recorders_share_the_stream_and_book_everything_once(connection, database, redis_url, database_url):
    ids = [uuid7() for _ in range(600)]
    recorders = [
        Recorder(redis.Redis.from_url(redis_url), open_database(database_url, pool_size=1), name=f"recorder-{n}")
        for n in (1, 2)
    ]
    with running(recorders[0]), running(recorders[1]):
        for start in range(0, 600, 50):  # the halves of a request land with different recorders
            send(connection, *(pack(settlement(i)) for i in ids[start : start + 50]))
            send(connection, *(pack(report(i)) for i in ids[start : start + 50]))
        eventually(lambda: connection.xlen(RECORDS) == 0)
    assert count(database, "requests WHERE NOT pending AND device_seconds = 0.00000001") == 600
    assert count(database, "attempts") == 600
    assert count(database, "awaiting_report") == count(database, "awaiting_settlement") == 0


def test_after_a_flushall_the_group_is_made_again_and_nothing_is_missed(recorder, connection, database):
    connection.flushall()
    send(connection, pack(settlement()))
    assert recorder.turn() == 0
    assert recorder.turn() == 1
    assert count(database, "requests") == 1


def test_what_a_dead_recorder_left_is_taken_over(connection, database, monkeypatch):
    monkeypatch.setattr("service.records_stream._TAKE_OVER_AFTER_MS", 50)
    dead, alive = (Recorder(connection, database, name=name) for name in ("dead", "alive"))
    dead.turn()
    send(connection, *(pack(settlement()) for _ in range(3)))
    assert len(dead._stream.read(10, wait_ms=100)) == 3
    time.sleep(0.1)
    assert alive.turn() == 3
    assert count(database, "requests") == 3
    assert connection.xpending(RECORDS, RECORDER_GROUP)["pending"] == 0


def test_while_postgres_is_away_records_wait_and_nothing_is_acknowledged(
    recorder, connection, database, postgres_server, capfd
):
    with transaction(database) as books:
        name = books.scalar(text("SELECT current_database()"))
    with psycopg.connect(postgres_server.url("postgres"), autocommit=True) as admin:
        admin.execute(f"ALTER DATABASE {name} WITH ALLOW_CONNECTIONS false")
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        send(connection, *(pack(settlement()) for _ in range(5)))
        with running(recorder):
            eventually(lambda: connection.xpending(RECORDS, RECORDER_GROUP)["pending"] == 5)
            time.sleep(1.0)
            assert connection.xlen(RECORDS) == 5
            assert connection.llen(committed_key("p")) == 0
            admin.execute(f"ALTER DATABASE {name} WITH ALLOW_CONNECTIONS true")
            eventually(lambda: connection.xlen(RECORDS) == 0)
    assert count(database, "requests") == 5
    lines = capfd.readouterr()
    assert (lines.out + lines.err).count("records wait") == 1


def test_stopping_while_postgres_is_away_leaves_the_records_to_others(connection, redis_url):
    nowhere = open_database("postgresql://nobody@127.0.0.1:1/none")
    recorder = Recorder(connection, nowhere, name="stuck")
    with running(recorder):
        send(connection, pack(settlement()))
        eventually(lambda: connection.exists(RECORDS) and connection.xlen(RECORDS) == 1)
    assert connection.xlen(RECORDS) == 1


def start_recorder(database_url: str, redis_url: str, home) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENNYWEIGHT_")}
    environment |= {
        "PENNYWEIGHT_DATABASE_URL": database_url,
        "PENNYWEIGHT_REDIS_URL": redis_url,
        "PENNYWEIGHT_HOME": str(home),
        "PENNYWEIGHT_SECRET": "test" * 16,
    }
    return subprocess.Popen([sys.executable, "-m", "service.cli", "recorder"], env=environment, stderr=subprocess.PIPE)


def test_kill_9_again_and_again_loses_and_doubles_nothing(connection, database, database_url, redis_url, tmp_path):
    producer = RecordProducer(connection, tmp_path / "spool", "p")
    producer.start(revive=lambda held: held)
    ids = [uuid7() for _ in range(4000)]
    for request_id in ids:
        producer.put(pack(settlement(request_id)))
        producer.put(pack(report(request_id)))
    for kill in range(3):
        process = start_recorder(database_url, redis_url, tmp_path)
        booked = count(database, "requests")
        eventually(lambda booked=booked: count(database, "requests") > booked, within=30)
        process.kill()
        process.wait()
        assert producer.uncommitted() > 0, f"kill {kill} came while it worked"
    process = start_recorder(database_url, redis_url, tmp_path)
    eventually(lambda: producer.uncommitted() == 0, within=40)
    process.send_signal(signal.SIGTERM)
    _, logs = process.communicate(timeout=20)
    assert process.returncode == 0
    assert b"recorder stopped" in logs
    producer.close()
    assert count(database, "requests") == count(database, "attempts") == len(ids)
    assert count(database, "requests WHERE pending OR device_seconds <> 0.00000001") == 0
