"""Background work: one beat whatever dies, no pile of messages, no chore that stops the others."""

import threading
import time

import pytest
import redis

from service.beat import LEAD_KEY, Beat, Lead
from service.celery_app import Chore, ChoreRunner, broker_url, connect, schedule

QUEUE = "pw:celery:tasks"


def beats(redis_url, count, *, every_s=1.0):
    app = connect(redis_url)
    schedule(app, [Chore(name="chore", every_s=every_s, work=lambda: 0)])
    return [Beat(app, redis.Redis.from_url(redis_url), me=str(number)) for number in range(count)]


def test_of_several_beats_one_sends(redis_url):
    several, started = beats(redis_url, 3), time.monotonic()
    for beat in several:
        beat.start()
    time.sleep(3.5)
    with redis.Redis.from_url(redis_url) as connection:
        sent, seconds = connection.llen(QUEUE), time.monotonic() - started
    for beat in several:
        beat.stop()
    assert 2 <= sent <= seconds + 1


def test_when_the_leader_stops_another_leads_and_sends_everything_at_once(redis_url):
    first, second = beats(redis_url, 2, every_s=3600)
    with redis.Redis.from_url(redis_url) as connection:
        first.start()
        until(lambda: connection.llen(QUEUE) == 1)
        second.start()
        first.stop()
        until(lambda: connection.llen(QUEUE) == 2)
        second.stop()
        assert connection.get(LEAD_KEY) is None


def test_the_lead_of_a_killed_process_lapses(redis_url):
    with redis.Redis.from_url(redis_url) as connection:
        assert Lead(connection, "killed").holds()
        assert not Lead(connection, "other").holds()
        assert 0 < connection.pttl(LEAD_KEY) <= 10_000
        connection.pexpire(LEAD_KEY, 1)
        until(lambda: Lead(connection, "other").holds())
        assert not Lead(connection, "killed").holds()


def test_a_beat_goes_on_after_redis_was_emptied(redis_url):
    (beat,) = beats(redis_url, 1)
    with redis.Redis.from_url(redis_url) as connection:
        beat.start()
        until(lambda: connection.llen(QUEUE))
        connection.flushall()
        until(lambda: connection.llen(QUEUE))
        beat.stop()


def test_nobody_leads_while_redis_is_away():
    assert not Lead(redis.Redis(host="127.0.0.1", port=1), "me").holds()


def test_a_chore_that_still_runs_is_not_started_again():
    entered, leave, runs = threading.Event(), threading.Event(), []

    def work():
        runs.append(1)
        entered.set()
        leave.wait(10)
        return 1

    runner = ChoreRunner(Chore(name="slow", every_s=1, work=work))
    thread = threading.Thread(target=runner.run)
    thread.start()
    entered.wait(10)
    runner.run()
    leave.set()
    thread.join()
    runner.run()
    assert len(runs) == 2


def test_a_chore_that_fails_is_tried_again_and_its_message_is_not_logged(capsys):
    def work():
        raise RuntimeError("row with a text of a user")

    runner = ChoreRunner(Chore(name="failing", every_s=1, work=work))
    runner.run()
    runner.run()
    written = "".join(capsys.readouterr())
    assert written.count("RuntimeError") == 2
    assert "text of a user" not in written


@pytest.mark.parametrize(
    ("ours", "kombus"),
    [
        ("redis://:pw@host:6379/2", "redis://:pw@host:6379/2"),
        ("rediss://user:pw@host:6379/0", "rediss://user:pw@host:6379/0"),
        ("unix:///run/valkey.sock", "redis+socket:///run/valkey.sock?virtual_host=0"),
        ("unix://:pw@/run/valkey.sock?db=3", "redis+socket://:pw@/run/valkey.sock?virtual_host=3"),
    ],
)
def test_the_broker_is_the_same_server(ours, kombus):
    assert broker_url(ours) == kombus


def until(condition, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
