"""One line of a batch: body → order → generation → output kept → settled.

The output is kept under the claim before the request is settled as completed. So a runner that dies before that leaves
a failed request at price 0 and a line that is run again, and one that dies right after it gives the line away: a line
is charged once at most, and ends once.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import msgspec
import structlog
from sqlalchemy import Engine

from billing.batches import Batch, ClaimedLine, LineState, finish_line
from billing.contents import Seal
from billing.database import DatabaseUnavailable, transaction
from billing.ids import uuid7
from engine.protocol import JobClass, Status
from service.batch.file import CHAT, read_body, write_output
from service.completion import Piece, joined
from service.desk import DeniedError, UnavailableError
from service.dispatch import Dispatch
from service.generation import MAX_ATTEMPTS, Generation
from service.order import Order
from service.reading import prompt_of, sampling_of
from service.reply import failure
from service.settlement import Failure, failed
from service.telemetry import Tracing, trace_id_of
from service.wire.errors import ApiError, ErrorBody, internal, invalid
from service.wire.forms import ChatForm, TextForm
from service.wire.responses import usage

log = structlog.get_logger()

PAUSE_S: Final = 1.0  # between two tries to keep an output while Postgres is away
_MARGIN_S: Final = 5.0  # before the deadline of a request, after which it settles by itself
# Not the line's fault: it will be run again.
_PASSING: Final = {Failure.REDIS_LOST, Failure.SHUTTING_DOWN, Failure.OWNER_LOST, Failure.ADMISSION_UNKNOWN}


class LaterError(Exception):
    """The line cannot be run now, or was run by another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What the lines of one process share."""

    dispatch: Dispatch
    tracing: Tracing
    database: Engine
    seal: Seal
    timeout_s: float  # of a request
    cache_salt: str


class LineRun:
    """One claimed line, until it has ended. Raises LaterError when it has not."""

    def __init__(self, desk: Desk, batch: Batch, line: ClaimedLine) -> None:
        self._desk = desk
        self._batch = batch
        self._line = line

    async def run(self) -> None:
        try:
            await self._run()
        except LaterError:
            raise
        except Exception as error:
            place = {"batch_id": str(self._batch.id), "line": self._line.line}
            log.exception("batch line failed", **place, error=type(error).__name__)
            await self._keep_error(internal(), uuid7(), within_s=PAUSE_S)  # else it would fail again and again

    async def _run(self) -> None:
        try:
            order = await self._order()
        except ApiError as error:
            await self._keep_error(error, uuid7(), within_s=self._desk.timeout_s)
            return
        try:
            generation = self._desk.dispatch.open(order)
        except UnavailableError as error:
            raise LaterError from error
        try:
            await self._generate(generation)
        finally:
            generation.close()

    async def _order(self) -> Order:
        """Raises ApiError for a line that can never be run, LaterError while no worker serves its model."""
        if self._line.body is None:
            raise invalid("The line expired before it could be run.", code="batch_expired")
        data = read_body(self._batch.endpoint, self._line.body)
        model = self._desk.dispatch.workers.model(data.model)
        if model is None or not model.cards:
            raise LaterError
        prompt = await prompt_of(model, data)
        sampling = sampling_of(model, data, prompt=len(prompt), wanted=data.wanted_tokens)
        request_id = uuid7()
        traceparent = self._desk.tracing.begin(request_id, self._batch.endpoint, model.name, "")
        return Order(
            tenant_id=self._batch.tenant_id,
            api_key_id=self._batch.api_key_id,
            scopes=(),  # limits per minute are for callers who wait
            model=model,
            endpoint=self._batch.endpoint,
            stream=False,
            prompt=prompt,
            sampling=sampling,
            timeout_s=self._desk.timeout_s,
            stop=data.stops,
            klass=JobClass.BATCH,
            weight=self._batch.weight,
            cache_salt=self._desk.cache_salt,
            batch_id=self._batch.id,
            trace_id=trace_id_of(traceparent),
            traceparent=traceparent,
            request_id=request_id,
        )

    async def _generate(self, generation: Generation) -> None:
        try:
            await generation.admitted()
        except (DeniedError, UnavailableError) as error:
            self._desk.tracing.refuse(generation.order.request_id, "later")
            raise LaterError from error
        pieces = [piece async for piece in generation.pieces()]
        ended = generation.ended
        if ended is None or ended.status is Status.CANCELLED or _is_passing(generation):
            raise LaterError
        if ended.status is Status.FAILED:
            await self._keep_error(
                failure(ended.error_code), generation.order.request_id, within_s=self._desk.timeout_s
            )
            return
        await generation.released()
        body = self._answer(generation, joined(pieces), ended.finish_reason)
        try:
            await self._keep(LineState.DONE, 200, body, generation.order.request_id, within_s=_remaining_s(generation))
        except BaseException:
            generation.ended = failed(Failure.INTERNAL)  # nobody has the answer: nobody pays for it
            raise
        if pieces:
            generation.accepted(pieces[-1])
        generation.complete()

    def _answer(self, generation: Generation, answer: Piece, finish_reason: str) -> bytes:
        order = generation.order
        kind = ChatForm if order.endpoint == CHAT else TextForm
        form = kind(
            request_id=order.request_id,
            created=int(order.created_at),
            model=order.model.name,
            fingerprint=order.model.revision,
            includes_usage=False,
            tells=order.sampling.logprobs is not None,
        )
        prompt = len(order.prompt)
        counts = usage(prompt, min(generation.facts.cached_tokens, prompt), generation.billed_tokens)
        return form.whole(answer, finish_reason, counts)

    async def _keep_error(self, error: ApiError, request_id: UUID, *, within_s: float) -> None:
        body = msgspec.json.encode(ErrorBody(error.body.error))
        await self._keep(LineState.FAILED, error.status, body, request_id, within_s=within_s, error_code=error.cause)

    async def _keep(
        self,
        state: LineState,
        status: int,
        body: bytes,
        request_id: UUID,
        *,
        within_s: float,
        error_code: str | None = None,
    ) -> None:
        """Raises LaterError when the claim is lost, or Postgres is away for too long."""
        output = write_output(self._line.custom_id, request_id, status, body)

        def write() -> bool:
            with transaction(self._desk.database) as connection:
                return finish_line(
                    connection, self._desk.seal, self._batch, self._line.line, by=self._desk.dispatch.boot,
                    state=state, output=output, request_id=request_id, error_code=error_code,
                )  # fmt: skip

        until = time.monotonic() + within_s
        while True:
            try:
                if await asyncio.to_thread(write):
                    return
                raise LaterError
            except DatabaseUnavailable as error:
                if time.monotonic() + PAUSE_S > until:
                    raise LaterError from error
                await asyncio.sleep(PAUSE_S)


def _is_passing(generation: Generation) -> bool:
    """Whether it failed for a reason that lies outside the line. A line that costs several workers is to blame."""
    code = generation.ended.error_code if generation.ended else ""
    return code in _PASSING or (code == Failure.WORKER_LOST and len(generation.facts.attempts) < MAX_ATTEMPTS)


def _remaining_s(generation: Generation) -> float:
    passed_s = (time.monotonic_ns() - generation.order.started_ns) / 1e9
    return generation.order.timeout_s - passed_s - _MARGIN_S
