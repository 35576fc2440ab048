"""Whose the device's time was. Integer nanoseconds; every split adds up to what was split.

A step's device time is shared out among the sequences that were in it: each gets its Shapley value (``engine.shares``)
of the model of step times (``engine.step_time``), scaled so that the shares add up to what was measured. A stall is
overhead, nobody's share. Computing a prefix is booked to whoever ran it, not to who finds it in the cache.

A share belongs to its attempt as *used* until it turns out to have served nobody: what only recomputed lost rows is
*wasted* at once, what came after a stop string or in an attempt that failed is moved from used to wasted when the
attempt closes. The interval in which it closes books the same move from busy to waste, so that on any cut

    Σ busy = Σ used of attempts closed in the interval + open now - open at the last cut      (exactly)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from engine.accounts import Account
from engine.plan import ModelLimits, Rows, StepPlan, StepResult
from engine.protocol import Interval, WasteCause
from engine.shares import shares
from engine.step_time import StepTime
from engine.timeline import Span, Timeline
from engine.work import by_rule, load


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
    host_ns: int = 0  # inside the executor's call, but nobody's: not the device's, or a stall
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
        self.step_time: StepTime | None = None  # from the first step on
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

        What the call took beyond the device's time is overhead, and so is a stall. The device's clock is another one,
        so its time is cut to the span.
        """
        model, loads = self._model(limits), [load(chunk) for chunk in plan.chunks]
        coefficients = model.coefficients
        measured_ns = min(result.device_ns, held_ns)
        device_ns = measured_ns - model.learn(loads, measured_ns)
        self._share_out(plan, shares(device_ns, loads, coefficients))
        self._tally.host_ns += held_ns - device_ns
        accounts = [self._accounts[chunk.request_id] for chunk in plan.chunks]
        for account, chunk in zip(accounts, plan.chunks, strict=True):
            account.count(chunk, len(accounts))
        self._tally.count(result.rows, len({account.tenant for account in accounts}))

    def book_failure(self, plan: StepPlan, limits: ModelLimits, held_ns: int) -> None:
        """A step has raised: its time belongs to its attempts, which will fail. Nobody knows which rows were computed,
        so none are counted, and nothing is learnt.
        """
        loads = [load(chunk) for chunk in plan.chunks]
        self._share_out(plan, shares(held_ns, loads, self._model(limits).coefficients))

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

    def _model(self, limits: ModelLimits) -> StepTime:
        if self.step_time is None:
            self.step_time = StepTime(by_rule(limits, fixed_rows=self._fixed_rows))
        return self.step_time

    def _share_out(self, plan: StepPlan, parts_ns: Sequence[int]) -> None:
        for chunk, share_ns in zip(plan.chunks, parts_ns, strict=True):
            wasted = self._accounts[chunk.request_id].add_share(chunk, share_ns)
            self._tally.busy_ns += share_ns - wasted
            self._tally.waste_ns += wasted


def unaccounted_ns(interval: Interval) -> int:
    """What no span holds: the time between a stop stamp and the next start stamp."""
    spans = interval.busy_ns + interval.idle_ns + interval.loading_ns + interval.waste_ns + interval.overhead_ns
    return interval.end_ns - interval.start_ns - spans
