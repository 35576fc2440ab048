"""A request's life at its owner, from admission to settlement, whatever happens in between.

    admitted → attempts, each fed by one worker's events → ended → engine stopped → released → delivered → settled

The life is a task of its own, so neither a client that goes away nor an exception in its handler can cut it short: both
only say so, and say it without awaiting. Whoever answers the client reads ``pieces`` at its own pace; what a slow one
has not read yet is bounded by max_tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Final

import msgspec
import structlog
from redis.exceptions import RedisError

from engine.protocol import Abort, AbortReason, AttemptSeen, Event, FinishReason, Status
from service.admission import Granted, Refused, Usage
from service.completion import Piece
from service.desk import DeniedError, Desk, UnavailableError
from service.order import Order
from service.settlement import (
    CANCELLED,
    Delivery,
    End,
    Facts,
    Failure,
    abort_reason,
    billed_tokens,
    failed,
    finished,
    used_tokens,
)

log = structlog.get_logger()

MAX_ATTEMPTS: Final = 5
ABORT_WAIT_S: Final = 5.0  # for the worker's last event after an abort
RETRY_S: Final = 0.25  # between two looks for a worker that takes over


class Generation:
    """One request. ``take``, ``lost``, ``end`` and ``leave`` never wait and may be called in any order."""

    def __init__(self, order: Order, boot: str, desk: Desk, *, failover_wait_s: float) -> None:
        self.order = order
        self.origin = order.origin(boot)
        self.ended: End | None = None
        self.facts = Facts()
        self.delivery = Delivery()
        self.usage: list[Usage] = []  # of the order's scopes, after admission
        self.worker = ""
        self.admitted_ns: int | None = None  # monotonic
        self._desk = desk
        self._failover_wait_s = failover_wait_s
        self._job = order.job(self.origin)
        self._completion = order.completion()
        self._admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lost = False
        self._engine_done = False
        self._left = False
        self._delivered = False
        self._news = asyncio.Event()  # for the life
        self._ready = asyncio.Event()  # for the reader of pieces
        self._released = asyncio.Event()
        self._closed = asyncio.Event()

    @property
    def billed_tokens(self) -> int:
        return billed_tokens(self._how(), self.facts)

    @property
    def attempt(self) -> int:
        return self._job.attempt

    @property
    def holds(self) -> bool:
        """Whether it has slots, reservations and a place at a worker."""
        return bool(self.worker) and not self._released.is_set()

    # What its owner and its client tell it.

    def take(self, event: Event) -> None:
        """One event of a worker. Events of another attempt, and those after a gap, are dropped."""
        if event.attempt != self._job.attempt or self._engine_done:
            return
        if event.index < len(self._completion.ids):
            return  # it was told twice
        unknowing = event.ids and event.logprobs is None and self.order.sampling.logprobs is not None
        if unknowing or event.index > len(self._completion.ids):
            self.lost()  # some were missed, or the worker is of a version without logprobs
            return
        self._note(event)
        if self._completion.push(event.ids, event.logprobs) and self.ended is None:
            self.facts.kept = self._completion.kept
            self.end(finished(FinishReason.STOP))
        self.facts.generated = len(self._completion.ids)
        if event.finish is not None:
            self._finish(event.finish, event.error)
        self._ready.set()

    def lost(self, attempt: int | None = None) -> None:
        """The worker of this attempt is gone, or some of its events are. None: of the current one."""
        if attempt is not None and attempt != self.attempt:
            return  # another has taken over meanwhile
        self._lost = True
        self._news.set()

    def end(self, end: End) -> None:
        """It ends like this, unless it has ended already."""
        if self.ended is None:
            self.ended = end
        self._news.set()
        self._ready.set()

    def leave(self) -> None:
        """The client has gone, or whoever answered it failed to."""
        self._left = True
        self.end(CANCELLED)
        self._closed.set()

    def close(self) -> None:
        """Whoever answers the client is done with it. Says ``leave`` unless ``complete`` came before."""
        if not self._delivered:
            self.leave()
        self._closed.set()

    def accepted(self, piece: Piece) -> None:
        """The server's send has accepted a piece."""
        self.delivery.accepted(piece.tokens)

    def complete(self) -> None:
        """The server's send has accepted the end of the answer."""
        if self._left or self.ended is None:
            return
        self._delivered = True
        if self.ended.status is Status.COMPLETED:
            self.delivery.tokens = self.billed_tokens

    def run_on(self, worker: str) -> None:
        """Redis has given the current attempt to this worker."""
        self.worker = worker
        card = self._desk.card(worker)
        self.facts.attempts.append(
            AttemptSeen(
                attempt=self._job.attempt,
                worker=worker,
                device=card.device if card else "",
                device_kind=card.device_kind if card else "",
                device_ns=0,
            )
        )

    # What it offers to whoever answers the client.

    async def admitted(self) -> None:
        """Raises DeniedError or UnavailableError."""
        await asyncio.shield(self._admission)

    async def started(self, patience_s: float) -> None:
        """Wait until there is text or the request has ended, but not for ever."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while not self._completion.ready and self.ended is None:
                    self._ready.clear()
                    await self._ready.wait()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Text as it comes, until the request has ended: then ``ended`` says how."""
        while True:
            self._ready.clear()
            if piece := self._completion.take():
                yield piece
            elif self.ended is not None:
                return
            else:
                await self._ready.wait()

    async def released(self) -> None:
        """Wait until nothing is held any more, so that a client that has its answer may ask again at once."""
        await self._released.wait()

    # Its life.

    async def live(self) -> None:
        if not await self._enter():
            return
        passed_s = (time.monotonic_ns() - self.order.started_ns) / 1e9
        timer = asyncio.get_running_loop().call_later(max(0.0, self.order.timeout_s - passed_s), self._expire)
        try:
            await self._run()
            await self._stop_engine()
        except Exception as error:
            log.exception("generation failed", request_id=str(self.order.request_id), error=type(error).__name__)
            self.end(failed(Failure.INTERNAL))
        finally:
            await self._desk.release(self.order, used_tokens(self.order, self._how(), self.facts))
            self._released.set()
            await self._closed.wait()
            timer.cancel()
            if not self._delivered and self._how().status is Status.COMPLETED:
                self.ended = CANCELLED
            self._desk.book(self)

    async def _enter(self) -> bool:
        try:
            answer = await self._desk.admit(self.order, self._job)
        except RedisError as error:
            self._desk.forget(self)
            self._refuse(UnavailableError(type(error).__name__))
            return False
        if isinstance(answer, Refused):
            self._refuse(DeniedError(answer))
            return False
        self.usage = answer.used
        self.run_on(answer.worker)
        try:
            self._desk.enter(self)
        except OSError as error:
            log.error("spool cannot be written", error=type(error).__name__)  # noqa: TRY400  # no traceback needed
            await self._abort(AbortReason.OWNER_FAILED)
            await self._desk.release(self.order, 0)
            self._refuse(UnavailableError(type(error).__name__))
            return False
        self.admitted_ns = time.monotonic_ns()
        self._admission.set_result(None)
        return True

    def _refuse(self, error: Exception) -> None:
        self._admission.set_exception(error)
        self._admission.exception()  # the client may be gone: then nobody asks

    async def _run(self) -> None:
        while self.ended is None:
            self._news.clear()
            if self._lost:
                await self._fail_over()
            else:
                await self._news.wait()

    async def _fail_over(self) -> None:
        """Send the next attempt, with the ids that are here, to whoever lives. Ends the request when nobody does."""
        until = time.monotonic() + self._failover_wait_s
        await self._abort(AbortReason.SUPERSEDED)
        attempt = self._job.attempt + 1
        self._job = msgspec.structs.replace(self._job, attempt=attempt, generated=[list(self._completion.ids)])
        while self.ended is None:
            if attempt > MAX_ATTEMPTS or time.monotonic() > until:
                self.end(failed(Failure.WORKER_LOST))
                return
            with contextlib.suppress(RedisError):
                answer = await self._desk.admit(self.order, self._job)
                if isinstance(answer, Granted):
                    self._lost = False
                    self.run_on(answer.worker)
                    return
            await asyncio.sleep(RETRY_S)

    async def _stop_engine(self) -> None:
        """Abort what still runs and wait for the worker's last word, which says how much was generated."""
        if self._engine_done:
            return
        await self._abort(abort_reason(self._how(), self.facts), keep=self.facts.kept)
        until = time.monotonic() + ABORT_WAIT_S
        while not self._engine_done and not self._lost and time.monotonic() < until:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), until - time.monotonic())

    async def _abort(self, reason: AbortReason, keep: int | None = None) -> None:
        abort = Abort(request_id=self.order.request_id, attempt=self._job.attempt, reason=reason, keep=keep)
        await self._desk.abort(self.worker, abort)

    def _expire(self) -> None:
        """The deadline: also for a client that reads so slowly that its answer never ends."""
        self.end(failed(Failure.DEADLINE_EXCEEDED))
        self._closed.set()

    def _how(self) -> End:
        return self.ended or failed(Failure.INTERNAL)

    def _note(self, event: Event) -> None:
        if self.facts.queue_ns is None:
            self.facts.queue_ns = event.queue_ns
        self.facts.cached_tokens = event.cached_tokens
        if self.facts.attempts and self.facts.attempts[-1].attempt == event.attempt:
            self.facts.attempts[-1] = msgspec.structs.replace(self.facts.attempts[-1], device_ns=event.device_ns)

    def _finish(self, reason: FinishReason, error: str) -> None:
        if reason is FinishReason.CANCELLED and self.ended is None:
            self.lost()  # the worker gave it up by itself: it had lost sight of this owner
            return
        self._engine_done = True
        self._completion.finish()
        self.end(finished(reason, error))
