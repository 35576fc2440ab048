"""How to see from outside that a process is ready. Each question takes a second at most and never raises."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from typing import Final

import redis

from engine.keys import PREFIX, RECORDER_GROUP, RECORDS, WORKERS, lease_key
from engine.protocol import WorkerCard, WorkerState, unpack_card

_ASK_S: Final = 1.0
BEAT_LEAD: Final = PREFIX + "beat"  # as service.beat.LEAD_KEY, whose module would import Celery here


def answers(url: str, _since: float = 0.0) -> bool:
    """With 200."""
    try:
        with urllib.request.urlopen(url, timeout=_ASK_S) as answer:  # noqa: S310 — always http, to our own children
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def worker_name() -> str:
    """Of the one worker that `up` runs here; stable, so that a restarted worker replaces the one before."""
    return f"{socket.gethostname()}/worker-0"


def worker_serves(redis_url: str, since: float) -> bool:
    return serving_worker(redis_url, since) is not None


def serving_worker(redis_url: str, since: float) -> WorkerCard | None:
    """The card of our worker, if one that started since (UTC seconds) is ready and makes progress."""
    try:
        with redis.Redis.from_url(redis_url, socket_timeout=_ASK_S) as connection:
            for data in connection.hvals(WORKERS):
                card = unpack_card(data)
                ready = card.state is WorkerState.READY and card.name == worker_name() and card.started_at >= since
                if ready and connection.exists(lease_key(card.worker)):
                    return card
    except redis.RedisError:
        pass
    return None


def recorder_reads(redis_url: str, since: float) -> bool:
    """Whether a member of the recorders' group has asked for records since."""
    try:
        with redis.Redis.from_url(redis_url, socket_timeout=_ASK_S) as connection:
            consumers = connection.xinfo_consumers(RECORDS, RECORDER_GROUP)
    except redis.RedisError:  # also: no stream or no group yet
        return False
    return any(consumer["idle"] / 1000 < time.time() - since for consumer in consumers)


def somebody_beats(redis_url: str, since: float) -> bool:
    """Whether the background work has a clock: that of this process, or of another one before it."""
    if time.time() - since < _ASK_S:
        return False
    try:
        with redis.Redis.from_url(redis_url, socket_timeout=_ASK_S) as connection:
            return bool(connection.exists(BEAT_LEAD))
    except redis.RedisError:
        return False
