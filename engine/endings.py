"""How an attempt ends: what its owner is told, what its report says, and whether its time was for somebody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine.accounts import Account
from engine.meter import Meter
from engine.protocol import AbortReason, AttemptReport, ErrorCode, FinishReason, Outcome, WasteCause
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Ending:
    outcome: Outcome
    finish: FinishReason | None  # None: the owner is gone or has moved on, and is told nothing
    waste: WasteCause | None = None  # of the whole attempt; STOP_OVERSHOOT: of what came after the tokens that count
    error: ErrorCode | None = None


ABORTED: Final = {
    AbortReason.CLIENT_GONE: Ending(Outcome.CANCELLED, FinishReason.CANCELLED),
    AbortReason.STOP_STRING: Ending(Outcome.COMPLETED, FinishReason.CANCELLED, WasteCause.STOP_OVERSHOOT),
    AbortReason.SUPERSEDED: Ending(Outcome.SUPERSEDED, None, WasteCause.SUPERSEDED),
    AbortReason.OWNER_LOST: Ending(Outcome.CANCELLED, None, WasteCause.LOST, ErrorCode.OWNER_LOST),
    AbortReason.OWNER_FAILED: Ending(Outcome.FAILED, FinishReason.CANCELLED, WasteCause.FAILED, ErrorCode.OWNER_FAILED),
}

FAILED: Final = Ending(Outcome.FAILED, FinishReason.FAILED, WasteCause.FAILED, ErrorCode.STEP_FAILED)


def completed(finish: FinishReason) -> Ending:
    return Ending(Outcome.COMPLETED, finish)


def refused(code: ErrorCode) -> Ending:
    return Ending(Outcome.REFUSED, FinishReason.REFUSED, None, code)


def expired(sequence: Sequence, code: ErrorCode) -> Ending:
    """A stream keeps what it was told so far; without one the request has failed and its time served nobody."""
    served = sequence.job.origin.stream and sequence.completion
    return Ending(Outcome.EXPIRED, FinishReason.EXPIRED, None if served else WasteCause.FAILED, code)


def report(
    sequence: Sequence, account: Account, ending: Ending, meter: Meter, *, now_ns: int, finished_at: float
) -> AttemptReport:
    """The closed account and the stamps of an attempt that has just ended."""
    first_token_ns = now_ns if sequence.first_token_ns is None else sequence.first_token_ns
    scheduled_ns = now_ns if sequence.scheduled_ns is None else sequence.scheduled_ns
    return AttemptReport(
        request_id=sequence.job.request_id,
        attempt=sequence.job.attempt,
        origin=sequence.job.origin,
        worker=meter.identity.worker,
        device=meter.identity.device,
        device_kind=meter.identity.device_kind,
        outcome=ending.outcome,
        error=ending.error or "",
        prompt_tokens=account.prompt_tokens,
        cached_tokens=sequence.cached,
        recomputed_tokens=account.recomputed_tokens,
        generated_tokens=account.generated_tokens,
        received_at=sequence.received_at,
        finished_at=finished_at,
        queue_ns=sequence.inbox_ns + scheduled_ns - sequence.received_ns,
        prefill_ns=first_token_ns - scheduled_ns,
        decode_ns=now_ns - first_token_ns,
        used_ns=account.used_ns,
        wasted_ns={cause.value: ns for cause, ns in account.wasted_ns.items()},
        kv_block_ns=sequence.kv_block_ns,
        steps=account.steps,
        preemptions=sequence.preemptions,
        peak_batch=account.peak_batch,
        interval=meter.number,
    )
