"""The clock of the background work: however many `pennyweight tasks` run, one of them sends what is due.

Celery's beat runs in a thread of every `pennyweight tasks`, and ticks only while it holds the lead: a key with expiry
that it renews with every tick. When the leader dies another takes over within ``LEAD_S`` and sends everything once at
once, which is harmless because every chore may run again at any time.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import redis
import structlog
from celery import Celery
from celery.beat import Scheduler, Service

from engine.keys import PREFIX

log = structlog.get_logger()

LEAD_KEY: Final = PREFIX + "beat"
LEAD_S: Final = 10
TICK_S: Final = 1.0

# KEYS[1] lead, ARGV[1] who asks, ARGV[2] milliseconds. Answers 1 while the asker leads.
_TAKE_OR_RENEW: Final = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_GIVE_UP: Final = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class Lead:
    """Who sends what is due, as Redis knows it."""

    def __init__(self, connection: redis.Redis, me: str) -> None:
        self._redis = connection
        self._me = me
        self._held = False

    def holds(self) -> bool:
        """Take or renew the lead. False while another has it, or while Redis cannot be asked."""
        try:
            held = bool(self._redis.eval(_TAKE_OR_RENEW, 1, LEAD_KEY, self._me, LEAD_S * 1000))
        except redis.RedisError as error:
            log.warning("beat waits for redis", error=type(error).__name__)
            held = False
        if held != self._held:
            log.info("beat leads" if held else "beat no longer leads", process=self._me)
        self._held = held
        return held

    def give_up(self) -> None:
        try:
            self._redis.eval(_GIVE_UP, 1, LEAD_KEY, self._me)
        except redis.RedisError:
            log.info("the lead is left to lapse", process=self._me)


class LeadingScheduler(Scheduler):  # type: ignore[misc] # celery has no types
    """Celery's scheduler, ticking only while it leads. The schedule rests in memory: nothing in it must survive."""

    def __init__(self, app: Celery, *, lead: Lead, **options: Any) -> None:  # noqa: ANN401 - celery's own arguments
        self._lead = lead
        self._led = False
        super().__init__(app, **options)

    def tick(self, *args: Any, **options: Any) -> float:  # noqa: ANN401 - as above
        leads = self._lead.holds()
        if leads and not self._led:
            self._make_all_due()
        self._led = leads
        if not leads:
            return TICK_S
        return min(float(super().tick(*args, **options)), TICK_S)

    def _make_all_due(self) -> None:
        """Entries count from the start of the process; a new leader starts with everything."""
        for entry in self.schedule.values():
            entry.last_run_at = entry.default_now().replace(year=2000, month=1, day=1)
        self._heap = None


class Beat:
    """The thread in which the scheduler ticks."""

    def __init__(self, app: Celery, connection: redis.Redis, *, me: str) -> None:
        self._lead = Lead(connection, me)
        self._service = Service(app, max_interval=TICK_S)
        self._service.scheduler = LeadingScheduler(app, lead=self._lead, max_interval=TICK_S)
        self._thread = threading.Thread(target=self._service.start, name="beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._service.stop()
        self._thread.join(timeout=5)
        self._lead.give_up()
