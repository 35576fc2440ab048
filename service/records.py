"""Records of the wire as the books take them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from billing import records as books
from engine.protocol import AttemptReport, Interval, Origin, Record, Settlement

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Sorted:
    """Records by kind: the arguments of ``billing.recording.record``."""

    settlements: list[books.Settlement] = field(default_factory=list)
    attempts: list[books.Attempt] = field(default_factory=list)
    intervals: list[books.Interval] = field(default_factory=list)


Booked = books.Settlement | books.Attempt | books.Interval


def convert(record: Record) -> Booked:
    """Raises ValueError or OverflowError for times that are none."""
    match record:
        case Settlement():
            return _settlement(record)
        case AttemptReport():
            return _attempt(record)
        case Interval():
            return _interval(record)


def sort_out(records: Iterable[Booked]) -> Sorted:
    found = Sorted()
    for record in records:
        match record:
            case books.Settlement():
                found.settlements.append(record)
            case books.Attempt():
                found.attempts.append(record)
            case books.Interval():
                found.intervals.append(record)
    return found


def _settlement(s: Settlement) -> books.Settlement:
    return books.Settlement(
        request_id=s.request_id,
        origin=_origin(s.origin),
        status=s.status.value,
        finish_reason=s.finish_reason,
        error_code=s.error_code,
        winning_attempt=s.winning_attempt or None,
        attempts=tuple(
            books.AttemptSeen(
                attempt=seen.attempt,
                worker=seen.worker,
                device=seen.device,
                device_kind=seen.device_kind,
                device_ns=seen.device_ns,
            )
            for seen in s.attempts
        ),
        prompt_tokens=s.prompt_tokens,
        cached_tokens=s.cached_tokens,
        generated_tokens=s.generated_tokens,
        delivered_tokens=s.delivered_tokens,
        billed_tokens=s.billed_tokens,
        queue_ns=s.queue_ns,
        ttft_ns=s.ttft_ns,
        tpot_ns=s.tpot_ns,
        total_ns=s.total_ns,
        finished_at=_moment(s.finished_at),
    )


def _attempt(r: AttemptReport) -> books.Attempt:
    return books.Attempt(
        request_id=r.request_id,
        attempt=r.attempt,
        origin=_origin(r.origin),
        worker=r.worker,
        device=r.device,
        device_kind=r.device_kind,
        outcome=r.outcome.value,
        error=r.error,
        prompt_tokens=r.prompt_tokens,
        cached_tokens=r.cached_tokens,
        recomputed_tokens=r.recomputed_tokens,
        generated_tokens=r.generated_tokens,
        drafted_tokens=r.drafted_tokens,
        accepted_tokens=r.accepted_tokens,
        received_at=_moment(r.received_at),
        finished_at=_moment(r.finished_at),
        queue_ns=r.queue_ns,
        prefill_ns=r.prefill_ns,
        decode_ns=r.decode_ns,
        used_ns=r.used_ns,
        wasted_ns=r.wasted_ns,
        kv_block_ns=r.kv_block_ns,
        steps=r.steps,
        preemptions=r.preemptions,
        peak_batch=r.peak_batch,
        interval=r.interval,
    )


def _interval(i: Interval) -> books.Interval:
    return books.Interval(
        worker=i.worker,
        device=i.device,
        device_kind=i.device_kind,
        deployment=i.deployment,
        number=i.number,
        started_at=_moment(i.started_at),
        start_ns=i.start_ns,
        end_ns=i.end_ns,
        busy_ns=i.busy_ns,
        idle_ns=i.idle_ns,
        loading_ns=i.loading_ns,
        waste_ns=i.waste_ns,
        overhead_ns=i.overhead_ns,
        open_ns=i.open_ns,
        prompt_tokens=i.prompt_tokens,
        recomputed_tokens=i.recomputed_tokens,
        generated_tokens=i.generated_tokens,
        drafted_tokens=i.drafted_tokens,
        steps=i.steps,
        mixed_tenant_steps=i.mixed_tenant_steps,
        last=i.last,
    )


def _origin(o: Origin) -> books.Origin:
    return books.Origin(
        tenant_id=o.tenant_id,
        api_key_id=o.api_key_id,
        kind=o.kind.value,
        model=o.model,
        route=o.route,
        arm=o.arm,
        deployment=o.deployment,
        revision=o.revision,
        endpoint=o.endpoint,
        stream=o.stream,
        boot_id=o.boot_id,
        boot_seq=o.boot_seq or None,
        batch_id=o.batch_id,
        trace_id=o.trace_id,
        created_at=_moment(o.created_at),
        deadline=_moment(o.deadline),
    )


def _moment(seconds: float) -> datetime:
    """To the microsecond: a float of today's seconds has no more."""
    return _EPOCH + timedelta(seconds=seconds)
