"""What the recorder hands over: a request settled, an attempt reported, an interval of a device's time.

Plain dataclasses, the books' own: times are aware datetimes, durations integer nanoseconds. Who sends them and how they
travel is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

LOST = "lost"  # outcome of an attempt that nobody reported
FAILED = "failed"  # status of a request that we failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Whom a request is for and where it came from."""

    tenant_id: UUID
    api_key_id: UUID
    kind: str
    model: str
    route: str
    arm: str
    deployment: str
    revision: str
    endpoint: str
    stream: bool
    boot_id: str  # the owner's
    boot_seq: int | None  # its number among that boot's admissions; None: not known
    batch_id: UUID | None
    trace_id: str
    created_at: datetime
    deadline: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSeen:
    """What the owner knew of an attempt."""

    attempt: int
    worker: str
    device: str
    device_kind: str
    device_ns: int  # used and wasted


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The end of a request, said once by its owner, or in the owner's place by the sweeper (``swept``)."""

    request_id: UUID
    origin: Origin
    status: str
    finish_reason: str = ""
    error_code: str = ""
    winning_attempt: int | None = None
    attempts: tuple[AttemptSeen, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    delivered_tokens: int = 0
    billed_tokens: int = 0
    queue_ns: int | None = None
    ttft_ns: int | None = None
    tpot_ns: int | None = None
    total_ns: int = 0
    finished_at: datetime
    swept: bool = False

    @property
    def serving_attempt(self) -> int | None:
        """Whose device time served the client: the one that won, else the last one tried; none if we failed it."""
        if self.status == FAILED:
            return None
        return self.winning_attempt or max((seen.attempt for seen in self.attempts), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What an attempt took, reported once by its worker, or booked as LOST in the worker's place."""

    request_id: UUID
    attempt: int
    origin: Origin | None  # None with LOST: its request has a row
    worker: str
    device: str
    device_kind: str
    outcome: str
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    received_at: datetime | None = None
    finished_at: datetime
    queue_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    used_ns: int = 0
    wasted_ns: dict[str, int] = field(default_factory=dict)  # by cause
    kv_block_ns: int = 0
    steps: int = 0
    preemptions: int = 0
    peak_batch: int = 0
    interval: int | None = None  # the worker's interval in which it closed; None with LOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Some seconds of one device in one worker boot, numbered from 1 and contiguous."""

    worker: str
    device: str
    device_kind: str
    deployment: str
    number: int
    started_at: datetime
    start_ns: int
    end_ns: int
    busy_ns: int = 0
    idle_ns: int = 0
    loading_ns: int = 0
    waste_ns: int = 0
    overhead_ns: int = 0
    open_ns: int = 0
    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    steps: int = 0
    mixed_tenant_steps: int = 0
    last: bool = False

    @property
    def ended_at(self) -> datetime:
        return self.started_at + timedelta(microseconds=(self.end_ns - self.start_ns) // 1000)
