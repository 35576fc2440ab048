"""The one Settlement of a request: what it ended as, what is billed, and how long it took as the client saw it.

Billed are the tokens that were generated until the end took effect: all of a completion that finished; up to and
including the token that completed a stop string; those until the abort took effect when the client went away; none when
we failed. A stream that its deadline cut short is settled as cancelled, and billed are the tokens it has delivered: the
deadline is the same for everybody and known before, and whoever asks for more than fits gets no tokens for nothing. So
``billed = 0 or delivered <= billed <= generated``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

import msgspec

from engine.protocol import AbortReason, AttemptSeen, ErrorCode, FinishReason, Origin, Settlement, Status, unpack_record
from service.order import Order


class Failure(StrEnum):
    """Why we failed an admitted request; error_code of its row, beside the engine's own ErrorCode."""

    WORKER_LOST = "worker_lost"  # no worker took it over in time
    REDIS_LOST = "redis_lost"
    OWNER_LOST = "owner_lost"  # the process that answered it died
    DEADLINE_EXCEEDED = "deadline_exceeded"
    SHUTTING_DOWN = "shutting_down"
    ADMISSION_UNKNOWN = "admission_unknown"  # admitted, but its owner learnt so only after it had refused it
    INTERNAL = "internal_error"


@dataclass(frozen=True, slots=True)
class End:
    """How a request ends; the first cause counts."""

    status: Status
    finish_reason: str  # as the client sees it
    error_code: str = ""


CANCELLED: Final = End(Status.CANCELLED, "cancelled")
OVERDUE: Final = frozenset({Failure.DEADLINE_EXCEEDED, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.DEVICE_SECONDS_EXCEEDED})


def completed(finish_reason: str) -> End:
    return End(Status.COMPLETED, finish_reason)


def failed(error_code: str) -> End:
    return End(Status.FAILED, "error", error_code)


def finished(reason: FinishReason, error: str = "") -> End:
    """How the request ends when its worker finishes its attempt for this reason."""
    if reason is FinishReason.STOP or reason is FinishReason.LENGTH:
        return completed(reason.value)
    if reason is FinishReason.EXPIRED:
        return failed(error or ErrorCode.DEADLINE_EXCEEDED)
    return failed(error or Failure.INTERNAL)


@dataclass(slots=True)
class Delivery:
    """What the server's send has accepted. Monotonic nanoseconds."""

    tokens: int = 0
    first_ns: int | None = None
    last_ns: int | None = None

    def accepted(self, tokens: int) -> None:
        """Content was accepted, and ``tokens`` of the completion are wholly shown by now."""
        self.tokens = tokens
        self.last_ns = time.monotonic_ns()
        if self.first_ns is None:
            self.first_ns = self.last_ns


@dataclass(slots=True, kw_only=True)
class Facts:
    """What the engine told of a request so far."""

    generated: int = 0
    kept: int | None = None  # up to a stop string
    cached_tokens: int = 0
    queue_ns: int | None = None
    attempts: list[AttemptSeen] = field(default_factory=list)


def abort_reason(end: End, facts: Facts) -> AbortReason:
    """What the engine is told when the request ends like this before its attempt does."""
    if facts.kept is not None:
        return AbortReason.STOP_STRING
    served = end.status is Status.CANCELLED or (end.error_code in OVERDUE and facts.generated)
    return AbortReason.CLIENT_GONE if served else AbortReason.OWNER_FAILED


def billed_tokens(end: End, facts: Facts) -> int:
    if end.status is Status.FAILED:
        return 0
    return facts.generated if facts.kept is None else facts.kept


def used_tokens(order: Order, end: End, facts: Facts) -> int:
    """What stays in the rate windows once it has ended."""
    if end.error_code in OVERDUE and order.stream and facts.generated:
        return len(order.prompt) + facts.generated
    return 0 if end.status is Status.FAILED else len(order.prompt) + billed_tokens(end, facts)


def settle(order: Order, origin: Origin, end: End, facts: Facts, delivery: Delivery) -> Settlement:
    now = time.monotonic_ns()
    total = now - order.started_ns
    billed = billed_tokens(end, facts)
    if end.error_code in OVERDUE and order.stream and delivery.tokens:
        end, billed = replace(end, status=Status.CANCELLED), delivery.tokens
    ttft = None if delivery.first_ns is None else delivery.first_ns - order.started_ns
    return Settlement(
        request_id=order.request_id,
        origin=origin,
        status=end.status,
        finish_reason=end.finish_reason,
        error_code=end.error_code,
        winning_attempt=0 if end.status is Status.FAILED or not facts.attempts else facts.attempts[-1].attempt,
        attempts=facts.attempts,
        prompt_tokens=len(order.prompt),
        cached_tokens=min(facts.cached_tokens, len(order.prompt)),
        generated_tokens=facts.generated,
        delivered_tokens=delivery.tokens,
        billed_tokens=billed,
        queue_ns=_at_most(facts.queue_ns, total if ttft is None else ttft),
        ttft_ns=ttft,
        tpot_ns=_tpot(delivery),
        total_ns=total,
        finished_at=time.time(),
    )


def provisional(order: Order, origin: Origin, attempts: Sequence[AttemptSeen]) -> Settlement:
    """What the adopter of a dead owner's spool sends in its place."""
    return Settlement(
        request_id=order.request_id,
        origin=origin,
        status=Status.FAILED,
        finish_reason="error",
        error_code=Failure.OWNER_LOST,
        attempts=list(attempts),
        prompt_tokens=len(order.prompt),
    )


def revive(held: bytes) -> bytes:
    """A dead owner's provisional Settlement, dated: the form in which ``RecordProducer.start`` wants it."""
    record = unpack_record(held)
    if not isinstance(record, Settlement):
        raise TypeError("only settlements are held")
    now = time.time()
    total = max(0, int((now - record.origin.created_at) * 1e9))
    return msgspec.msgpack.encode(msgspec.structs.replace(record, finished_at=now, total_ns=total))


def _at_most(value: int | None, bound: int) -> int | None:
    """The worker measures the wait by Redis' clock, this process the rest by its own: they may differ by a hair."""
    return None if value is None else max(0, min(value, bound))


def _tpot(delivery: Delivery) -> int | None:
    if delivery.first_ns is None or delivery.last_ns is None or delivery.last_ns == delivery.first_ns:
        return None
    return (delivery.last_ns - delivery.first_ns) // max(1, delivery.tokens - 1)
