"""Celery as we use it: JSON messages, a pool of threads, keys under a prefix of their own in the Redis of all.

A message is only a nudge; the truth is in Postgres. So a chore may run twice, late or not at all this time, and no
message is worth keeping: it expires when the next one is due.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qs, urlsplit

import redis
import structlog
from celery import Celery
from celery.platforms import SecurityWarning
from celery.signals import setup_logging, worker_shutting_down
from prometheus_client import Counter, Histogram

from engine.keys import PREFIX
from service.beat import Beat

log = structlog.get_logger()

THREADS: Final = 8
QUEUE: Final = "tasks"
VISIBILITY_S: Final = 3600  # no task runs longer: long work is cut into chunks

RUNS: Final = Counter("pennyweight_task_runs", "Background tasks, by outcome", ["task", "outcome"])
SECONDS: Final = Histogram("pennyweight_task_seconds", "Time of a background task", ["task"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Chore:
    """Something to do again and again. ``work`` answers how much it did; nothing done is no line in the log."""

    name: str
    every_s: float
    work: Callable[[], int]


class ChoreRunner:
    """Runs one chore, once at a time: a nudge that comes while it runs is dropped."""

    def __init__(self, chore: Chore) -> None:
        self._chore = chore
        self._running = threading.Lock()

    def run(self) -> None:
        if not self._running.acquire(blocking=False):
            RUNS.labels(self._chore.name, "busy").inc()
            return
        try:
            guarded(self._chore.name, self._chore.work)
        finally:
            self._running.release()


def guarded(task: str, work: Callable[[], int]) -> None:
    """Run it, count it, log it; whatever goes wrong, the next nudge tries again."""
    started = time.monotonic()
    try:
        done = work()
    except Exception as error:  # noqa: BLE001 - see above
        RUNS.labels(task, "failed").inc()
        log.warning("task failed", task=task, error=type(error).__name__)
        return
    seconds = time.monotonic() - started
    RUNS.labels(task, "done").inc()
    SECONDS.labels(task).observe(seconds)
    if done:
        log.info("task done", task=task, count=done, seconds=round(seconds, 3))


def connect(redis_url: str) -> Celery:
    """The Celery application, enough to enqueue with."""
    app = Celery("pennyweight", broker=broker_url(redis_url), set_as_current=False)
    app.conf.update(
        broker_transport_options={"global_keyprefix": f"{PREFIX}celery:", "visibility_timeout": VISIBILITY_S},
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        task_default_queue=QUEUE,
        task_ignore_result=True,
        task_serializer="json",
        accept_content=["json"],
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
    )
    return app


def broker_url(redis_url: str) -> str:
    """What kombu calls the same server: a unix socket is ``redis+socket://``, its database ``virtual_host``."""
    parts = urlsplit(redis_url)
    if parts.scheme != "unix":
        return redis_url
    database = parse_qs(parts.query).get("db", ["0"])[0]
    return f"redis+socket://{parts.netloc}{parts.path}?virtual_host={database}"


def schedule(app: Celery, chores: Sequence[Chore]) -> None:
    """Make the chores known as tasks, and due at their times."""
    for chore in chores:
        app.task(_function(ChoreRunner(chore)), name=chore.name, shared=False)
    app.conf.beat_schedule = {
        chore.name: {"task": chore.name, "schedule": chore.every_s, "options": {"expires": chore.every_s}}
        for chore in chores
    }


def _function(runner: ChoreRunner) -> Callable[[], None]:
    """Celery makes a class of every task, so a method of ours would lose its object."""

    def run() -> None:
        runner.run()

    return run


def work(app: Celery, redis_url: str, *, stopping: Callable[[], None]) -> int:
    """Work until SIGTERM or Ctrl-C, say ``stopping``, then finish what runs. Returns the exit status."""
    # Celery warns root because pickled messages can run code; ours are JSON.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    setup_logging.connect(_leave_logging_alone)
    worker_shutting_down.connect(lambda **_: stopping(), weak=False)
    with redis.Redis.from_url(redis_url, socket_timeout=5) as connection:
        beat = Beat(app, connection, me=f"{socket.gethostname()}-{os.getpid()}")
        worker = app.Worker(
            pool="threads", concurrency=THREADS, hostname=node_name(), without_gossip=True, without_mingle=True,
            quiet=True,  # no banner between the lines of the log
        )  # fmt: skip
        beat.start()
        try:
            worker.start()
        finally:
            beat.stop()
    return int(worker.exitcode or 0)


def node_name() -> str:
    """What this machine's worker is called among Celery's: asked by the health check."""
    return f"tasks@{socket.gethostname()}"


def _leave_logging_alone(**_: object) -> None:
    """Celery sets up logging of its own unless somebody takes its signal."""
