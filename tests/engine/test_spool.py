"""The spool loses nothing that a dead process had written and keeps nothing that was committed."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import redis
import structlog

from engine.adoption import Adopted, adopt
from engine.keys import DATA, RECORDS, SEQ, committed_key
from engine.spool import RecordProducer, Spool
from tests.full_disk import full_disk

A, B = b"a" * 16, b"b" * 16


def taken(folder):
    records: list[Adopted] = []

    def take(record):
        records.append(record)
        return True

    adopt(folder, take)
    return records


def left_by_a_killed(folder, elsewhere):
    """What the next process would find, if the one that writes to this folder were killed now."""
    shutil.copytree(folder, elsewhere)
    return taken(elsewhere)


@pytest.fixture(autouse=True)
def said():
    """What is logged; not printed, because a full disk would refuse that too."""
    with structlog.testing.capture_logs() as lines:
        yield lines


@pytest.fixture
def connection(redis_url):
    with redis.Redis.from_url(redis_url) as connection:
        yield connection


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)


def commit_all(connection, producer):
    """The recorder's part. Returns what was on the stream."""
    entries = connection.xrange(RECORDS)
    for entry, fields in entries:
        connection.xdel(RECORDS, entry)
        connection.rpush(committed_key(producer), fields[SEQ])
    return [fields[DATA] for _, fields in entries]


def test_a_dead_producers_records_are_adopted_once_and_in_order(tmp_path):
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
                import pathlib, time
                from engine.spool import Spool
                spool = Spool(pathlib.Path({str(tmp_path)!r}), "dead")
                for n in range(100):
                    spool.append(b"record %d" % n)
                spool.hold(b"a" * 16, b"held a", room=100)
                spool.hold(b"b" * 16, b"held b", room=100)
                spool.append(b"settled a", replaces=b"a" * 16)
                print("ready", flush=True)
                time.sleep(60)
            """),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    assert taken(tmp_path) == [], "a living producer keeps its file"
    child.send_signal(signal.SIGKILL)
    child.wait()
    records = taken(tmp_path)
    assert [r.payload for r in records] == [b"record %d" % n for n in range(100)] + [b"settled a", b"held b"]
    assert [r.held for r in records] == [False] * 101 + [True]
    assert taken(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_committed_records_are_forgotten_and_the_file_stays_small(tmp_path):
    spool = Spool(tmp_path, "p")
    for _ in range(40):
        numbers = [spool.append(os.urandom(1000)) for _ in range(100)]
        spool.commit(numbers[:-1])
    assert (tmp_path / "p.spool").stat().st_size < 2 << 20
    assert spool.uncommitted() == 40
    spool.close()
    assert len(taken(tmp_path)) >= 40


def test_a_torn_last_frame_is_dropped(tmp_path):
    spool = Spool(tmp_path, "p")
    spool.append(b"whole")
    spool.append(b"torn" * 100)
    spool.close()
    path = tmp_path / "p.spool"
    path.write_bytes(path.read_bytes()[:-7])
    assert [r.payload for r in taken(tmp_path)] == [b"whole"]


def test_a_clean_close_with_nothing_alive_leaves_no_file(tmp_path):
    spool = Spool(tmp_path, "p")
    spool.hold(b"k" * 16, b"admission", room=100)
    spool.commit([spool.append(b"settlement", replaces=b"k" * 16)])
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_tears_no_frame_and_what_it_refused_is_written_later(tmp_path):
    spool = Spool(tmp_path / "spool", "p")
    spool.append(b"before")
    with full_disk(1000):
        spool.append(b"too long" * 1000)
        with pytest.raises(OSError, match="too large"):
            spool.hold(A, b"held" * 1000, room=1)
        assert (spool.unwritten(), spool.uncommitted()) == (1, 2)
        found = left_by_a_killed(tmp_path / "spool", tmp_path / "full")
        assert [r.payload for r in found] == [b"before"]
        assert list((tmp_path / "full").iterdir()) == []
    spool.append(b"after")
    assert spool.unwritten() == 0
    found = left_by_a_killed(tmp_path / "spool", tmp_path / "later")
    assert [r.payload for r in found] == [b"before", b"too long" * 1000, b"after"]


def holds(spool, key):
    try:
        spool.hold(key, b"held" * 50, room=1000)
    except OSError:
        return False
    return True


def test_a_full_disk_refuses_what_would_be_held_and_never_what_replaces_it(tmp_path):
    spool = Spool(tmp_path / "spool", "p")
    keys = [b"%016d" % number for number in range(1000)]
    with full_disk(200_000):
        held = [key for key in keys if holds(spool, key)]
        for key in held:
            spool.append(key * 60, replaces=key)
        assert spool.unwritten() == 0
    assert 100 < len(held) < 200
    found = left_by_a_killed(tmp_path / "spool", tmp_path / "copy")
    assert found == [Adopted(payload=key * 60, held=False) for key in held]


def test_a_damaged_byte_costs_one_record_at_most_and_the_file_is_kept(tmp_path, said):
    spool = Spool(tmp_path / "whole", "p")
    spool.hold(A, b"held a", room=100)
    records = [b"record %d" % number for number in range(4)]
    for record in records[:-1]:
        spool.append(record)
    spool.append(records[-1], replaces=A)
    spool.hold(B, b"held b", room=100)
    spool.close()
    whole = (tmp_path / "whole" / "p.spool").read_bytes()
    for at in range(len(whole)):
        folder = tmp_path / str(at)
        folder.mkdir()
        (folder / "p.spool").write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        found = taken(folder)
        missing = {*records, b"held b"} - {r.payload for r in found}
        assert len(missing) <= 1, at
        if b"held a" in {r.payload for r in found}:
            assert missing == {records[-1]}, at
        assert [path.name for path in folder.iterdir()] == ["p.damaged"]
        assert taken(folder) == []
    errors = [line for line in said if line["event"] == "spool was damaged and is kept"]
    assert [(line["gaps"], line["lost_bytes"] > 0) for line in errors] == [(1, True)] * len(whole)


def test_what_cannot_be_adopted_is_set_aside_and_stops_nothing(tmp_path, connection):
    spool = Spool(tmp_path, "dead")
    spool.append(b"record")
    for number in range(3):
        spool.hold(b"%016d" % number, b"held %d" % number, room=100)
    spool.close()
    (tmp_path / "folder.spool").mkdir()

    def revive(held):
        if held == b"held 1":
            raise TypeError
        return held

    producer = RecordProducer(connection, tmp_path, "living")
    assert producer.start(revive) == 3
    until(lambda: connection.xlen(RECORDS) == 3)
    assert commit_all(connection, "living") == [b"record", b"held 0", b"held 2"]
    producer.close()
    assert {path.name for path in tmp_path.iterdir()} == {"dead.damaged", "folder.spool"}


def test_a_full_disk_adopts_into_memory_and_keeps_the_file_for_the_next(tmp_path, connection):
    spool = Spool(tmp_path, "dead")
    spool.append(b"record")
    spool.close()
    producer = RecordProducer(connection, tmp_path, "living")
    with full_disk(0):
        assert producer.start(lambda held: held) == 1
        until(lambda: connection.xlen(RECORDS) == 1)
        assert (tmp_path / "dead.spool").exists()
        commit_all(connection, "living")
        producer.close()
    assert [r.payload for r in taken(tmp_path)] == [b"record"]


def test_a_producer_that_closes_on_a_full_disk_says_what_it_lost(tmp_path, connection, said):
    producer = RecordProducer(connection, tmp_path, "p")
    producer.start(lambda held: held)
    with full_disk(0):
        producer.put(b"record")
        until(lambda: connection.xlen(RECORDS) == 1)
        producer.close(0.1)
    (lost,) = [line for line in said if line["event"].startswith("records lost")]
    assert (lost["records"], lost["never_sent"]) == (1, 0)


def test_a_compaction_that_the_disk_refuses_changes_nothing_and_is_done_later(tmp_path, connection):
    producer = RecordProducer(connection, tmp_path, "p")
    for number in range(10):
        producer.hold(b"%016d" % number, b"h" * 20_000, room=1)
    for _ in range(60):
        producer.put(b"r" * 20_000)
    with full_disk(0):
        producer.start(lambda held: held)
        until(lambda: connection.xlen(RECORDS) == 60)
        commit_all(connection, "p")
        until(lambda: producer.uncommitted() == 0)
        time.sleep(0.1)
        assert [path.name for path in tmp_path.iterdir()] == ["p.spool"]
    assert (tmp_path / "p.spool").stat().st_size > 1_200_000
    producer.put(b"later")
    until(lambda: connection.xlen(RECORDS) == 1)
    commit_all(connection, "p")
    until(lambda: (tmp_path / "p.spool").stat().st_size < 300_000)
    assert sum(r.held for r in left_by_a_killed(tmp_path, tmp_path / "copy")) == 10
    producer.close()


def test_nothing_ends_the_sender(tmp_path, connection):
    producer = RecordProducer(connection, tmp_path, "p")
    producer.start(lambda held: held)
    producer.put(b"first")
    connection.rpush(committed_key("p"), b"no number")
    until(lambda: connection.xlen(RECORDS) == 1 and not connection.llen(committed_key("p")))
    producer.put(b"second")
    until(lambda: connection.xlen(RECORDS) == 2)
    commit_all(connection, "p")
    until(lambda: producer.uncommitted() == 0)
    producer.close()


def test_a_log_on_a_full_disk_is_dropped_and_raises_nothing(tmp_path):
    code = """
        import structlog
        from engine.logs import configure_logs
        from tests.full_disk import full_disk
        configure_logs()
        log = structlog.get_logger()
        with full_disk(0):
            for _ in range(1000):
                log.error("dropped", text="x" * 1000)
        log.error("written")
    """
    with (tmp_path / "log").open("wb") as file:
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stderr=file, check=True)
    assert "written" in (tmp_path / "log").read_text()
