"""The worker's one loop, in one thread:

    exchange with Redis (events out, jobs in, lease) ──► engine.add, engine.abort ──► engine.step ──► reports ──► …

Nothing but this loop renews the lease, so a worker that makes no progress loses it. Redis may go away at any time: the
loop pauses, keeps what it has to say, and says it when Redis is back.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING, Final

import redis
import structlog

from engine.config import EngineConfig
from engine.core import Engine, StepOutput
from engine.exchange import Exchange
from engine.inbox import Inbox
from engine.meter import unaccounted_ns
from engine.metrics import Metrics
from engine.outbox import Outbox
from engine.owners import Owners
from engine.protocol import Interval, Job, WorkerState, pack
from engine.registration import Registration, ReplacedError
from engine.spool import RecordProducer
from engine.timeline import Span

if TYPE_CHECKING:
    from engine.telemetry import Tracing  # imported only where spans are wanted

log = structlog.get_logger()

IDLE_BLOCK_MS: Final = 500  # how long an idle worker waits for a job before it looks after its lease
PAUSE_S: Final = 0.2  # between two tries to reach Redis


class Exit(IntEnum):
    DRAINED = 0
    BROKEN = 1  # steps keep failing, or a bug: start it again
    UNUSABLE = 2  # configuration or model: starting it again as it is does not help
    REPLACED = 3  # another boot has taken its name


class Stop:
    """What signals ask for: to drain within a time, and at the second signal to stop at once."""

    def __init__(self, drain_s: float) -> None:
        self._drain_s = drain_s
        self.deadline = float("inf")  # monotonic seconds

    @property
    def asked(self) -> bool:
        return self.deadline < float("inf")

    def ask(self, _signal: int = 0, _frame: FrameType | None = None) -> None:
        self.deadline = time.monotonic() + (0.0 if self.asked else self._drain_s)


class Loop:
    """The loop around an engine. Owns its pace; everything else is owned by the parts."""

    def __init__(
        self,
        *,
        connection: redis.Redis,
        engine: Engine,
        registration: Registration,
        records: RecordProducer,
        metrics: Metrics,
        stop: Stop,
        config: EngineConfig,
        tracing: Tracing | None,
    ) -> None:
        worker = registration.card.worker
        self._redis = connection
        self._engine = engine
        self._registration = registration
        self._records = records
        self._metrics = metrics
        self._stop = stop
        self._config = config
        self._tracing = tracing
        self._inbox = Inbox(worker)
        self._outbox = Outbox(worker)
        self._owners = Owners()
        self._away = False  # Redis is
        self._failures = 0  # steps in a row that raised

    def run(self) -> Exit:
        """Until it has drained, is replaced or keeps failing. Leaves nothing open but the connection."""
        try:
            exit_code = self._loop()
        except ReplacedError:
            log.warning("another boot has taken this worker's name", name=self._registration.card.name)
            exit_code = Exit.REPLACED
        self._finish()
        return exit_code

    def _loop(self) -> Exit:
        while not self._drained():
            self._cut_when_due()
            if not self._exchange():
                continue
            self._take_in()
            if self._engine.has_work:
                self._put_out(self._engine.step())
                if self._failures >= self._config.max_failures:
                    return Exit.BROKEN
        return Exit.DRAINED

    def _drained(self) -> bool:
        if not self._stop.asked:
            return False
        if self._registration.card.state is not WorkerState.DRAINING:
            log.info(
                "draining", running=len(self._engine.scheduler.running), waiting=len(self._engine.scheduler.waiting)
            )
            self._registration.become(WorkerState.DRAINING)
            return False  # one more exchange tells it
        done = not (self._engine.has_work or self._outbox)
        return done or time.monotonic() >= self._stop.deadline

    def _exchange(self) -> bool:
        """One round trip. False: Redis is away; what was to be said is still there."""
        idle = not (self._engine.has_work or self._outbox or self._stop.asked or self._away)
        exchange = Exchange(self._redis)
        self._outbox.ask(exchange)
        self._registration.ask(exchange)
        self._owners.ask(exchange, self._engine.owners)
        self._inbox.ask(exchange, block_ms=IDLE_BLOCK_MS if idle else None)
        timeline = self._engine.meter.timeline
        if idle:
            timeline.enter(Span.IDLE)
        try:
            exchange.run()
        except redis.RedisError as error:
            timeline.enter(Span.OVERHEAD)
            self._pause(error)
            return False
        timeline.enter(Span.OVERHEAD)
        if self._away:
            log.info("redis is back")
            self._away = False
        return True

    def _pause(self, error: redis.RedisError) -> None:
        if not self._away:
            log.warning("redis is away: pausing", error=type(error).__name__)
            self._away = True
        time.sleep(PAUSE_S)

    def _take_in(self) -> None:
        for received in self._inbox.take():
            message = received.message
            if isinstance(message, Job):
                self._engine.add(message, inbox_ns=received.inbox_ns)
            else:
                self._engine.abort(message.request_id, message.attempt, message.reason, keep=message.keep)
        for owner in self._owners.lost():
            if owner in self._engine.owners:
                log.warning("owner lost: its attempts end", owner=owner)
                self._engine.abort_owner(owner)

    def _put_out(self, output: StepOutput) -> None:
        self._outbox.put(output.plan.number if output.plan else 0, output.events)
        for ended in output.ended:
            self._records.put(pack(ended.report))
            if self._tracing:
                self._tracing.attempt(ended)
        self._metrics.step(output, self._engine)
        if output.plan:
            self._note_failure(output)
        if not self._engine.has_work:
            self._engine.check_integrity()

    def _note_failure(self, output: StepOutput) -> None:
        error = output.failure
        self._failures = self._failures + 1 if error else 0
        if error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            log.error(
                "step failed",
                error=type(error).__name__,
                message=str(error).partition("\n")[0][:200],
                where=f"{where.filename}:{where.lineno}",
                attempts=len(output.ended),
                in_a_row=self._failures,
            )

    def _cut_when_due(self) -> None:
        if self._engine.meter.due(self._config.interval_s):
            self._cut()

    def _cut(self, *, last: bool = False) -> None:
        interval = self._engine.meter.cut(last=last)
        self._records.put(pack(interval))
        self._metrics.interval(interval)
        log.info("interval", **summary(interval))

    def _finish(self) -> None:
        """Leave the rest to its owners and close the books."""
        self._engine.abort_all()
        self._put_out(self._engine.step())
        self._cut(last=True)
        if self._outbox:
            with contextlib.suppress(ReplacedError):
                self._exchange()


def summary(interval: Interval) -> dict[str, int | float]:
    """An interval for a log line: shares of its wall time, and what no span holds."""
    wall_ns = interval.end_ns - interval.start_ns
    unaccounted = unaccounted_ns(interval)
    return {
        "number": interval.number,
        "seconds": round(wall_ns / 1e9, 3),
        "busy": round(interval.busy_ns / wall_ns, 4),
        "idle": round(interval.idle_ns / wall_ns, 4),
        "waste": round(interval.waste_ns / wall_ns, 4),
        "loading": round(interval.loading_ns / wall_ns, 4),
        "overhead": round(interval.overhead_ns / wall_ns, 4),
        "unaccounted": round(unaccounted / wall_ns, 9),
        "unaccounted_ns": unaccounted,
        "steps": interval.steps,
        "generated": interval.generated_tokens,
    }
