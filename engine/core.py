"""The engine: jobs in, steps, events and reports out. Knows no Redis, no torch and no money.

    add, abort ──► Scheduler (who computes what) ──► Runner (does it) ──► Meter (whose time it was) ──► StepOutput

It is driven by one thread. What ``add`` and ``abort`` end at once comes out with the next step.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID

import structlog

from engine import endings
from engine.accounts import Account
from engine.config import EngineConfig
from engine.endings import Ending
from engine.intake import Fence, refusal
from engine.meter import Meter
from engine.plan import Runner, StepPlan, StepResult
from engine.protocol import AbortReason, AttemptReport, ErrorCode, Event, FinishReason, Job, Outcome
from engine.scheduler import Scheduler
from engine.sequence import Place, Sequence
from engine.timeline import Span

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Ended:
    job: Job
    report: AttemptReport
    finish: FinishReason | None  # None: the owner was told nothing

    @property
    def reason(self) -> str:
        """Why it ended, in the words of telemetry: a stop string is a stop, whoever found it."""
        found_by_owner = self.report.outcome is Outcome.COMPLETED and self.finish is FinishReason.CANCELLED
        return FinishReason.STOP if found_by_owner else self.finish or self.report.outcome


@dataclass(slots=True)
class StepOutput:
    """What has happened since the last output."""

    plan: StepPlan | None = None
    result: StepResult | None = None  # None: nothing ran, or the step raised
    held_ns: int = 0  # span of the executor's call
    failure: Exception | None = None  # what the step raised; its attempts are among ``ended``
    events: dict[str, list[Event]] = field(default_factory=dict)  # by owner
    ended: list[Ended] = field(default_factory=list)


class Engine:
    """Owns the living attempts."""

    def __init__(
        self, runner: Runner, meter: Meter, config: EngineConfig, *, wall: Callable[[], float] = time.time
    ) -> None:
        self.meter = meter
        self.scheduler = Scheduler(config, runner.limits)
        self._runner = runner
        self._limits = runner.limits
        self._wall = wall
        self._fence = Fence(config.remembered_requests)
        self._live: dict[UUID, Sequence] = {}
        self._owners: Counter[str] = Counter()
        self._deadlines: list[tuple[float, UUID, int]] = []
        self._arrivals = 0
        self._output = StepOutput()

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._output.ended)

    @property
    def owners(self) -> set[str]:
        """Boot ids of those who wait for something from here."""
        return set(self._owners)

    def add(self, job: Job, *, inbox_ns: int = 0) -> None:
        """Take a job that waited ``inbox_ns`` in the inbox. A repeated or overtaken attempt is dropped."""
        if not self._fence.passes(job.request_id, job.attempt):
            log.info("job dropped: not above the highest attempt seen", **_names(job))
            return
        self.abort(job.request_id, job.attempt - 1, AbortReason.SUPERSEDED)
        sequence = self._enter(job, inbox_ns)
        if ending := self._ends_at_once(sequence):
            self._end(sequence, ending)
            return
        self.scheduler.add(sequence)
        heapq.heappush(self._deadlines, (job.origin.deadline, job.request_id, job.attempt))

    def abort(self, request_id: UUID, attempt: int, reason: AbortReason, *, keep: int | None = None) -> None:
        """End the request's attempts up to this one, now and in future. An unknown request is not an error.

        ``keep``, with STOP_STRING: tokens of the completion that count; None: all of them.
        """
        self._fence.raise_to(request_id, attempt)
        sequence = self._live.get(request_id)
        if sequence and sequence.job.attempt <= attempt:
            counts = sequence.completion if keep is None else keep
            self._end(sequence, endings.ABORTED[reason], keep=counts if reason is AbortReason.STOP_STRING else 0)

    def abort_owner(self, owner: str) -> None:
        self._abort_where(lambda job: job.origin.boot_id == owner, AbortReason.OWNER_LOST)

    def abort_all(self) -> None:
        """Leave everything to its owners: they see this worker's lease go and try elsewhere."""
        self._abort_where(lambda _: True, AbortReason.SUPERSEDED)

    def step(self) -> StepOutput:
        """Schedule → run → update. What a step raises is in the output and fails its attempts, never the engine."""
        self._expire()
        plan = self.scheduler.schedule(self.meter.timeline.clock())
        if plan.chunks:
            self._run(plan)
            self._update(plan)
        output, self._output = self._output, StepOutput()
        return output

    def check_integrity(self) -> None:
        """The books of memory, of places and of time agree. Raises AssertionError with the numbers."""
        places = len(self.scheduler.waiting) + len(self.scheduler.running)
        counts = (places, self.meter.open_accounts, self._owners.total())
        assert counts == (len(self._live),) * 3, f"{len(self._live)} attempts live; places, accounts, owners: {counts}"
        self.scheduler.kv.check_integrity({(s.job.request_id, s.choice) for s in self.scheduler.running})

    def _enter(self, job: Job, inbox_ns: int) -> Sequence:
        known = [*job.prompt, *(job.generated[0] if job.generated else ())]
        sequence = Sequence(
            job=job,
            arrival=self._arrivals,
            tokens=known,
            prompt=len(job.prompt),
            given=len(known),
            received_at=self._wall(),
            received_ns=self.meter.timeline.clock(),
            inbox_ns=inbox_ns,
        )
        self._arrivals += 1
        self._live[job.request_id] = sequence
        self._owners[job.origin.boot_id] += 1
        self.meter.open(job.request_id, job.origin.tenant_id)
        return sequence

    def _ends_at_once(self, sequence: Sequence) -> Ending | None:
        if code := refusal(sequence.job, self._limits):
            return endings.refused(code)
        if not self._wall() < sequence.job.origin.deadline:  # a NaN has passed too
            return endings.expired(sequence, ErrorCode.DEADLINE_EXCEEDED)
        finish = sequence.finish(self._limits.eos_token_ids)
        return endings.completed(finish) if finish else None

    def _expire(self) -> None:
        now = self._wall()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id, attempt = heapq.heappop(self._deadlines)
            sequence = self._live.get(request_id)
            if sequence and sequence.job.attempt == attempt:
                self._end(sequence, endings.expired(sequence, ErrorCode.DEADLINE_EXCEEDED))

    def _run(self, plan: StepPlan) -> None:
        output, timeline = self._output, self.meter.timeline
        output.plan = plan
        timeline.enter(Span.BUSY)
        try:
            output.result = self._runner.execute(plan)
        except Exception as error:  # noqa: BLE001 whatever it is, only this step's attempts fail
            output.failure = error
        output.held_ns = timeline.enter(Span.OVERHEAD)

    def _update(self, plan: StepPlan) -> None:
        result, held_ns = self._output.result, self._output.held_ns
        sequences = [self._live[chunk.request_id] for chunk in plan.chunks]
        if result is None:
            self.meter.book_failure(plan, self._limits, held_ns)
            for sequence in sequences:
                self._end(sequence, endings.FAILED)
            return
        self.meter.book(plan, result, self._limits, held_ns)
        for number, logprob in result.logprobs.items():
            sequences[number].logprobs = [logprob]
        for sequence, chunk, token in zip(sequences, plan.chunks, result.drawn, strict=True):
            assert (token is not None) == chunk.draws, "the runner draws exactly where the plan says"
            self.scheduler.ran(sequence, chunk, token)
            self._continue_or_end(sequence, [] if token is None else [token])

    def _continue_or_end(self, sequence: Sequence, ids: list[int]) -> None:
        if ids and sequence.first_token_ns is None:
            sequence.first_token_ns = self.meter.timeline.clock()
        limit_s = sequence.job.max_device_seconds
        if ids and (finish := sequence.finish(self._limits.eos_token_ids)):
            self._end(sequence, endings.completed(finish), ids=ids)
        elif limit_s is not None and self.meter.account(sequence.job.request_id).device_ns > limit_s * 1e9:
            self._end(sequence, endings.expired(sequence, ErrorCode.DEVICE_SECONDS_EXCEEDED), ids=ids)
        elif ids:
            self._tell(sequence, self.meter.account(sequence.job.request_id), ids)

    def _end(self, sequence: Sequence, ending: Ending, *, ids: list[int] | None = None, keep: int = 0) -> None:
        """The one way out: blocks are free, the account is closed, the owner is told, the report is written."""
        job, now_ns = sequence.job, self.meter.timeline.clock()
        if sequence.place is not Place.OUTSIDE:
            self.scheduler.remove(sequence, now_ns)
        del self._live[job.request_id]
        self._owners[job.origin.boot_id] -= 1
        if not self._owners[job.origin.boot_id]:
            del self._owners[job.origin.boot_id]
        account = self.meter.close(job.request_id, ending.waste, keep=keep - sequence.resumed)
        if ending.finish:
            self._tell(sequence, account, ids or [], ending)
        report = endings.report(sequence, account, ending, self.meter, now_ns=now_ns, finished_at=self._wall())
        self._output.ended.append(Ended(job, report, ending.finish))

    def _tell(self, sequence: Sequence, account: Account, ids: list[int], ending: Ending | None = None) -> None:
        event = Event(
            request_id=sequence.job.request_id,
            attempt=sequence.job.attempt,
            choice=sequence.choice,
            index=sequence.completion - len(ids),
            ids=ids,
            device_ns=account.device_ns,
            finish=ending.finish if ending else None,
            cached_tokens=sequence.cached_prompt,
            queue_ns=sequence.queue_ns,
            error=ending.error or "" if ending else "",
            logprobs=sequence.logprobs if ids else None,
        )
        self._output.events.setdefault(sequence.job.origin.boot_id, []).append(event)

    def _abort_where(self, condition: Callable[[Job], bool], reason: AbortReason) -> None:
        for sequence in [s for s in self._live.values() if condition(s.job)]:
            self.abort(sequence.job.request_id, sequence.job.attempt, reason)


def _names(job: Job) -> dict[str, str | int]:
    return {"request_id": str(job.request_id), "tenant_id": str(job.origin.tenant_id), "attempt": job.attempt}
