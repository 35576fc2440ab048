"""Whose the device's time was. Integer nanoseconds; every split adds up to what was split.

A step's device time is shared out among the sequences that were in it (``shares``). A share belongs to its attempt as
*used* until it turns out to have served nobody: what only recomputed lost rows is *wasted* at once, what came after a
stop string or in an attempt that failed is moved from used to wasted when the attempt closes. The interval in which it
closes books the same move from busy to waste, so that on any cut

    Σ busy = Σ used of attempts closed in the interval + open now - open at the last cut      (exactly)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from engine.plan import Chunk, ModelLimits, Rows, StepPlan, StepResult
from engine.protocol import Interval, WasteCause
from engine.timeline import Span, Timeline


def largest_remainder(total: int, weights: Sequence[int]) -> list[int]:
    """Split ``total`` in proportion to ``weights`` (not negative, not all 0) into integers whose sum is ``total``."""
    whole = sum(weights)
    parts = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: -(total * weights[i] % whole))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def attended(chunk: Chunk) -> int:
    """Pairs of a row and a position it attends to: the row at position p attends to p + 1 of them."""
    return (chunk.end * (chunk.end + 1) - chunk.start * (chunk.start + 1)) // 2


def work(chunk: Chunk, limits: ModelLimits) -> int:
    """Multiply-adds of a chunk: of its rows, of its attended pairs, and of the head where it draws."""
    rows, drawn = len(chunk.tokens), int(chunk.draws)
    return rows * limits.macs_per_row + attended(chunk) * limits.macs_per_attended + drawn * limits.macs_per_draw


def shares(step_ns: int, chunks: Sequence[Chunk], limits: ModelLimits, *, fixed_rows: int) -> list[int]:
    """Nanoseconds of a step for each of its chunks; they add up to ``step_ns``.

    The rule: a step has a fixed part (weights are read once, whatever the batch) worth ``fixed_rows`` rows of linear
    work, shared equally; the rest goes by work, which is multiply-adds (``work``).
    """
    fixed = fixed_rows * limits.macs_per_row
    works = [work(chunk, limits) for chunk in chunks]
    return largest_remainder(step_ns, [fixed + len(chunks) * work for work in works])


@dataclass(slots=True)
class Account:
    """Device time and tokens of one attempt. Tokens are counted from the plan, not from what the executor says."""

    tenant: UUID
    used_ns: int = 0
    wasted_ns: Counter[WasteCause] = field(default_factory=Counter)
    used_after: list[int] = field(default_factory=list)  # used_ns after the step that drew each token
    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    peak_batch: int = 0

    @property
    def device_ns(self) -> int:
        return self.used_ns + self.wasted_ns.total()

    def add_share(self, chunk: Chunk, share_ns: int) -> int:
        """Book a share; returns the part of it that was wasted on recomputing, by rows inside the chunk."""
        recomputed = max(0, min(chunk.end, chunk.watermark) - chunk.start)
        wasted = share_ns * recomputed // len(chunk.tokens)
        self.used_ns += share_ns - wasted
        if wasted:
            self.wasted_ns[WasteCause.PREEMPTION] += wasted
        return wasted

    def count(self, chunk: Chunk, batch: int) -> None:
        self.prompt_tokens += max(0, min(chunk.end, chunk.given) - max(chunk.start, chunk.watermark))
        self.recomputed_tokens += max(0, min(chunk.end, chunk.watermark) - chunk.start)
        self.generated_tokens += chunk.draws
        if chunk.draws:
            self.used_after.append(self.used_ns)
        self.steps += 1
        self.peak_batch = max(self.peak_batch, batch)

    def waste(self, cause: WasteCause, *, keep: int = 0) -> int:
        """Move from used to ``cause`` what came after the first ``keep`` tokens drawn; returns how much."""
        moved = self.used_ns - self._used_for(keep)
        self.used_ns -= moved
        if moved:
            self.wasted_ns[cause] += moved
        return moved

    def _used_for(self, drawn: int) -> int:
        if drawn <= 0:
            return 0
        return self.used_after[drawn - 1] if drawn <= len(self.used_after) else self.used_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who measures what, as it stands in every report and interval."""

    worker: str
    device: str
    device_kind: str
    deployment: str


@dataclass(slots=True)
class _Tally:
    """What is booked in the interval that is open; thrown away with it."""

    started_at: float
    start_ns: int
    busy_ns: int = 0
    waste_ns: int = 0
    host_ns: int = 0  # inside the executor's call, but not the device's
    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    mixed_tenant_steps: int = 0

    def move(self, wasted_ns: int) -> None:
        self.busy_ns -= wasted_ns
        self.waste_ns += wasted_ns

    def count(self, rows: Rows, tenants: int) -> None:
        self.prompt_tokens += rows.prompt
        self.recomputed_tokens += rows.recomputed
        self.generated_tokens += rows.generated
        self.steps += 1
        self.mixed_tenant_steps += tenants > 1


class Meter:
    """Owns the accounts of living attempts and the open interval."""

    def __init__(
        self, identity: Identity, timeline: Timeline, *, fixed_rows: int, wall: Callable[[], float] = time.time
    ) -> None:
        self.identity = identity
        self.timeline = timeline
        self.number = 1  # of the open interval
        self._fixed_rows = fixed_rows
        self._wall = wall
        self._accounts: dict[UUID, Account] = {}
        since_start_ns = timeline.clock() - timeline.cut_ns  # loading, which came before there was a meter
        self._tally = _Tally(wall() - since_start_ns / 1e9, timeline.cut_ns)

    def open(self, request_id: UUID, tenant: UUID) -> None:
        self._accounts[request_id] = Account(tenant)

    @property
    def open_accounts(self) -> int:
        return len(self._accounts)

    def account(self, request_id: UUID) -> Account:
        return self._accounts[request_id]

    def book(self, plan: StepPlan, result: StepResult, limits: ModelLimits, held_ns: int) -> None:
        """A step has run: share out its device time and count its tokens. ``held_ns``: the span of the whole call.

        What the call took beyond the device's time is overhead. The device's clock is another one, so its time is
        cut to the span.
        """
        self._share_out(plan, min(result.device_ns, held_ns), limits, held_ns)
        accounts = [self._accounts[chunk.request_id] for chunk in plan.chunks]
        for account, chunk in zip(accounts, plan.chunks, strict=True):
            account.count(chunk, len(accounts))
        self._tally.count(result.rows, len({account.tenant for account in accounts}))

    def book_failure(self, plan: StepPlan, limits: ModelLimits, held_ns: int) -> None:
        """A step has raised: its time belongs to its attempts, which will fail. Nobody knows which rows were computed,
        so none are counted.
        """
        self._share_out(plan, held_ns, limits, held_ns)

    def close(self, request_id: UUID, cause: WasteCause | None, *, keep: int = 0) -> Account:
        """The attempt has ended. With a cause, what came after the first ``keep`` tokens it drew is wasted."""
        account = self._accounts.pop(request_id)
        if cause:
            self._tally.move(account.waste(cause, keep=keep))
        return account

    def due(self, interval_s: float) -> bool:
        return self.timeline.clock() - self._tally.start_ns >= interval_s * 1e9

    def cut(self, *, last: bool = False) -> Interval:
        """Close the open interval and open the next where it ended. Never within a step."""
        spans = self.timeline.cut()
        tally, end_ns, worker = self._tally, self.timeline.cut_ns, self.identity
        interval = Interval(
            worker=worker.worker,
            device=worker.device,
            device_kind=worker.device_kind,
            deployment=worker.deployment,
            number=self.number,
            started_at=tally.started_at,
            start_ns=tally.start_ns,
            end_ns=end_ns,
            busy_ns=tally.busy_ns,
            idle_ns=spans[Span.IDLE],
            loading_ns=spans[Span.LOADING],
            waste_ns=tally.waste_ns,
            overhead_ns=spans[Span.OVERHEAD] + tally.host_ns,
            open_ns=sum(account.used_ns for account in self._accounts.values()),
            prompt_tokens=tally.prompt_tokens,
            recomputed_tokens=tally.recomputed_tokens,
            generated_tokens=tally.generated_tokens,
            steps=tally.steps,
            mixed_tenant_steps=tally.mixed_tenant_steps,
            last=last,
        )
        self.number += 1
        self._tally = _Tally(self._wall(), end_ns)
        return interval

    def _share_out(self, plan: StepPlan, device_ns: int, limits: ModelLimits, held_ns: int) -> None:
        parts = shares(device_ns, plan.chunks, limits, fixed_rows=self._fixed_rows)
        for chunk, share_ns in zip(plan.chunks, parts, strict=True):
            wasted = self._accounts[chunk.request_id].add_share(chunk, share_ns)
            self._tally.busy_ns += share_ns - wasted
            self._tally.waste_ns += wasted
        self._tally.host_ns += held_ns - device_ns


def unaccounted_ns(interval: Interval) -> int:
    """What no span holds: the time between a stop stamp and the next start stamp."""
    spans = interval.busy_ns + interval.idle_ns + interval.loading_ns + interval.waste_ns + interval.overhead_ns
    return interval.end_ns - interval.start_ns - spans
