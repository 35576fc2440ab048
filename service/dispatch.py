"""The owner of requests: one per process boot, be it an API process or a batch task. It knows no HTTP.

It hands jobs out through the admission, reads its own stream of events for all its requests at once, keeps its lease
and theirs from the same event loop (so a loop that is stuck loses them), and tells a generation when its worker is
gone. What must outlive the process is in its spool: a provisional failed Settlement from the admission on, then the
true one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final, Self, cast
from uuid import UUID

import msgspec
import redis
import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff, NoBackoff
from redis.exceptions import RedisError

from billing.ids import uuid7
from engine.keys import DATA, events_key, inbox_key, lease_key
from engine.protocol import Abort, AbortReason, Job, Settlement, WorkerCard, pack, unpack_events
from engine.spool import RecordProducer
from service.admission import Admission, Cause, Granted, Refused
from service.desk import UnavailableError
from service.generation import MAX_ATTEMPTS, Generation
from service.loops import end, for_ever
from service.order import Order
from service.settings import Settings
from service.settlement import Failure, failed, provisional, revive, settle
from service.workers import EVERY_S, Workers

log = structlog.get_logger()

_TIMEOUT_S: Final = 2.0  # of one call to Redis
_BLOCK_MS: Final = 1000
_READ: Final = 500
_PAUSE_S: Final = 0.2  # after an error of Redis
_SETTLE_S: Final = 8.0  # for what was ended by the drain: the abort's wait, and writing it down
_FORGET_FOR_S: Final = 60.0  # an admission that cannot be undone for so long has lost its lease anyway
_KEEP_EVENTS: Final = 10  # leases after which a dead owner's events vanish


class Dispatch:
    """``async with Dispatch(settings, observe=…) as dispatch``, then ``dispatch.open(order)`` for each request."""

    def __init__(self, settings: Settings, *, observe: Callable[[Generation, Settlement], None]) -> None:
        """``observe`` is called with every request that has been settled; it must not raise or wait."""
        self.boot = str(uuid7())
        self._settings = settings
        self._observe = observe
        self._redis = _connect(settings.redis_url, retries=2)
        self._reader = _connect(settings.redis_url, retries=0)  # its errors must be seen: they may mean lost events
        self._records: RecordProducer | None = None  # while it is open
        self._admission = Admission(self._redis, settings.lease_s)
        self.workers = Workers(self._redis)
        self._running: dict[UUID, Generation] = {}
        self._numbered = 0
        self._draining = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._last: bytes | str = "0-0"  # stream id of the events read last
        self._renewed = 0.0  # monotonic, 0: never
        self._server = ""  # run id of the Redis server
        self._emptied = 0.0  # when Redis was seen to have lost its data
        self._contact = time.monotonic()
        self._idle = asyncio.Event()
        self._idle.set()

    async def __aenter__(self) -> Self:
        """Start; waits for neither Redis nor workers. Raises OSError when the spool cannot be written."""
        self._records = _producer(self._settings.redis_url, self._settings.spool, self.boot)
        await asyncio.to_thread(self._records.start, revive)
        with contextlib.suppress(RedisError):
            await self._renew()
            await self.workers.refresh()
        loops = (self._read_events, self._keep_leases, self._watch_workers)
        self._loops = [asyncio.create_task(for_ever(loop), name=loop.__name__) for loop in loops]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain(0)
        await end([*self._loops, *self._tasks])
        with contextlib.suppress(RedisError):
            await self._redis.delete(lease_key(self.boot), events_key(self.boot))
        await asyncio.to_thread(self._producer.close)
        await self._reader.aclose()
        await self._redis.aclose()

    @property
    def _producer(self) -> RecordProducer:
        assert self._records is not None, "not open"
        return self._records

    @property
    def running(self) -> int:
        return len(self._running)

    def reachable(self) -> bool:
        """Whether Redis has answered lately."""
        return time.monotonic() - self._contact < 2 * _TIMEOUT_S

    async def ping(self) -> bool:
        try:
            return bool(await self._redis.ping())
        except RedisError:
            return False

    def open(self, order: Order) -> Generation:
        """Start the life of a request; its ``admitted`` says whether it may. Close it, whatever happens."""
        if self._draining:
            raise UnavailableError(Failure.SHUTTING_DOWN)
        generation = Generation(order, self.boot, self, failover_wait_s=self._settings.failover_wait_s)
        self._running[order.request_id] = generation
        self._idle.clear()
        self._spawn(self._live(generation))
        return generation

    async def drain(self, timeout_s: float) -> None:
        """Admit nothing more; let what runs finish until the timeout, then end it as failed and settle it."""
        self._draining = True
        await self._settled_within(timeout_s)
        for generation in list(self._running.values()):
            generation.end(failed(Failure.SHUTTING_DOWN))
        await self._settled_within(_SETTLE_S)
        for generation in list(self._running.values()):
            generation.close()
        await self._settled_within(1)

    async def _settled_within(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def _live(self, generation: Generation) -> None:
        try:
            await generation.live()
        finally:
            self._running.pop(generation.order.request_id, None)
            if not self._running:
                self._idle.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # The desk that generations come to.
    async def admit(self, order: Order, job: Job) -> Granted | Refused:
        answer = await self._admission.admit(job, order.scopes, self.workers.candidates(order.model))
        if isinstance(answer, Refused) and answer.cause is Cause.NO_WORKER:
            await self.workers.look()  # who was known may have been replaced since
            answer = await self._admission.admit(job, order.scopes, self.workers.candidates(order.model))
        self._contact = time.monotonic()
        return answer

    def enter(self, generation: Generation) -> None:
        number = self._numbered + 1
        generation.origin = msgspec.structs.replace(generation.origin, boot_seq=number)
        order = generation.order
        record = provisional(order, generation.origin, generation.facts.attempts)
        payload = pack(record)
        # The true one differs by some numbers and by further attempts, each shorter than all of this.
        self._producer.hold(order.request_id.bytes, payload, room=(MAX_ATTEMPTS + 1) * len(payload))
        self._numbered = number  # only now: a number without a record would be a gap

    def card(self, worker: str) -> WorkerCard | None:
        return self.workers.card(worker)

    async def abort(self, worker: str, abort: Abort) -> None:
        try:
            # A dead worker's inbox is not made anew.
            alive = self.workers.living(worker)
            await self._redis.xadd(inbox_key(worker), {DATA: pack(abort)}, nomkstream=not alive)
        except RedisError as error:
            log.warning("abort not sent", request_id=str(abort.request_id), error=type(error).__name__)

    async def release(self, order: Order, used_tokens: int) -> None:
        try:
            await self._admission.release(order.request_id, used_tokens=used_tokens)
        except RedisError as error:
            log.warning("release left to the lease", request_id=str(order.request_id), error=type(error).__name__)

    def forget(self, generation: Generation) -> None:
        self._spawn(self._forget(generation))

    def book(self, generation: Generation) -> None:
        ended = generation.ended or failed(Failure.INTERNAL)
        order = generation.order
        record = settle(order, generation.origin, ended, generation.facts, generation.delivery)
        self._producer.put(pack(record), replaces=order.request_id.bytes)
        self._observe(generation, record)

    async def _forget(self, generation: Generation) -> None:
        request_id = generation.order.request_id
        until = time.monotonic() + _FORGET_FOR_S
        while time.monotonic() < until:
            try:
                worker = await self._admission.forget(request_id)
            except RedisError:
                await asyncio.sleep(_PAUSE_S)
                continue
            if worker:
                await self.abort(worker, Abort(request_id=request_id, attempt=1, reason=AbortReason.OWNER_FAILED))
                generation.run_on(worker)
                generation.ended = failed(Failure.ADMISSION_UNKNOWN)
                with contextlib.suppress(OSError):  # no room: the sweeper settles it
                    self.enter(generation)
                    self.book(generation)
            return

    def _holding(self) -> list[Generation]:
        return [generation for generation in self._running.values() if generation.holds]

    # Its loops.

    async def _read_events(self) -> None:
        while True:
            try:
                entries = await _entries(self._reader, events_key(self.boot), self._last)
            except RedisError:
                await asyncio.sleep(_PAUSE_S)
                await self._look_for_losses()
                continue
            for entry, fields in entries:
                self._last = entry
                self._deliver(fields[DATA])

    def _deliver(self, data: bytes) -> None:
        try:
            batch = unpack_events(data)
        except msgspec.MsgspecError:
            log.warning("events cannot be read", size=len(data))
            return
        for event in batch.events:
            if generation := self._running.get(event.request_id):
                generation.take(event)

    async def _keep_leases(self) -> None:
        while True:
            with contextlib.suppress(RedisError):
                await self._renew()
            self._give_up_without_redis()
            await asyncio.sleep(self._settings.lease_s / 4)

    async def _renew(self) -> None:
        lease_ms = int(self._settings.lease_s * 1000)
        there = await self._redis.set(lease_key(self.boot), b"owner", px=lease_ms, get=True)
        now = time.monotonic()
        if there is None and self._renewed and now - self._renewed < self._settings.lease_s:
            self._redis_lost_data()
        self._renewed = self._contact = now
        await self._redis.xtrim(events_key(self.boot), minid=self._last)
        await self._redis.pexpire(events_key(self.boot), _KEEP_EVENTS * lease_ms)
        asked = {g.order.request_id: g.attempt for g in self._holding()}
        for request_id in await self._admission.renew(asked):
            if generation := self._running.get(request_id):
                generation.lost(asked[request_id])  # what it held is given to others: it must ask again
        if not self._server:
            self._server = await self._run_id()

    async def _watch_workers(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            with contextlib.suppress(RedisError):
                await self.workers.refresh()
                self._contact = time.monotonic()
                self._find_lost_workers()

    def _find_lost_workers(self) -> None:
        if time.monotonic() - self._emptied < self._settings.lease_s:
            return  # every lease vanished at once: living workers write theirs again
        for generation in self._holding():
            if not self.workers.living(generation.worker):
                generation.lost()

    async def _look_for_losses(self) -> None:
        """After an error of the reader: a server that was restarted may have lost jobs and events."""
        with contextlib.suppress(RedisError):
            server = await self._run_id()
            if self._server and server != self._server:
                self._redis_lost_data()
            self._server = server

    async def _run_id(self) -> str:
        return cast("str", (await self._redis.info("server"))["run_id"])

    def _redis_lost_data(self) -> None:
        log.warning("redis lost data: every running request is sent again", running=self.running)
        self._emptied = time.monotonic()
        for generation in self._holding():
            generation.lost()

    def _give_up_without_redis(self) -> None:
        if time.monotonic() - self._contact > self._settings.failover_wait_s:
            for generation in list(self._running.values()):
                generation.end(failed(Failure.REDIS_LOST))


async def _entries(reader: Redis, key: str, last: bytes | str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    reply = await reader.xread({key: last}, count=_READ, block=_BLOCK_MS)
    streams = cast("list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]", reply)
    return streams[0][1] if streams else []


def _connect(url: str, *, retries: int) -> Redis:
    backoff = ConstantBackoff(0.05) if retries else NoBackoff()
    return Redis.from_url(
        url,
        socket_timeout=_TIMEOUT_S + _BLOCK_MS / 1000 if not retries else _TIMEOUT_S,
        socket_connect_timeout=_TIMEOUT_S,
        retry=Retry(backoff, retries),
    )


def _producer(url: str, folder: Path, boot: str) -> RecordProducer:
    connection = redis.Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
    return RecordProducer(connection, folder, boot)
