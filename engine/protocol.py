"""The messages between owners, workers and the recorder. The Redis keys they travel on: ``engine.keys``.

The contract of the whole system: all that crosses a process border is one of the Structs below, packed as MessagePack.

    owner (gateway or batch runner) --Job, Abort--> inbox stream of one worker boot
    worker --EventBatch, one per step and owner--> events stream of that owner
    worker --AttemptReport, Interval--> records stream --> recorder
    owner  --Settlement-->              records stream --> recorder

Rules that hold for every message:

* Unknown fields are ignored and new fields carry a default, so processes of two versions can run side by side.
* Times of day are UTC seconds since the epoch; durations are integer nanoseconds from one process's monotonic clock.
* A worker is named by its *boot*: a restarted worker is another worker, with another inbox.
* Texts of users never travel: prompts and completions are token ids, and only Job and Event hold them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final
from uuid import UUID

import msgspec


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of everything that is sent: compact on the wire. ``frozen`` and ``kw_only`` are said by each."""


class Kind(StrEnum):
    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"


class JobClass(StrEnum):
    """Scheduling class; a worker serves INTERACTIVE before BATCH."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class FinishReason(StrEnum):
    """Why an attempt produces no further tokens, as the worker sees it."""

    STOP = "stop"  # end-of-sequence or a stop token id
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"  # an Abort took effect
    EXPIRED = "expired"  # the deadline or max_device_seconds passed
    REFUSED = "refused"  # can never fit this worker; Event.error says why
    FAILED = "failed"  # the worker failed it; Event.error says why


class ErrorCode(StrEnum):
    """Event.error and AttemptReport.error: what went wrong, in a word that an owner can turn into its own error."""

    # With REFUSED: the same job would be refused again by any worker of this deployment.
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # prompt + max_tokens is longer than the model's context
    KV_CAPACITY_EXCEEDED = "kv_capacity_exceeded"  # prompt + max_tokens is longer than the worker's KV memory
    EMPTY_PROMPT = "empty_prompt"
    OUT_OF_VOCABULARY = "out_of_vocabulary"  # a token id that the model does not have
    INVALID_SAMPLING = "invalid_sampling"
    UNSUPPORTED_KIND = "unsupported_kind"
    UNSUPPORTED_CHOICES = "unsupported_choices"
    UNSUPPORTED_ADAPTER = "unsupported_adapter"
    UNSUPPORTED_GRAMMAR = "unsupported_grammar"
    # With EXPIRED
    DEADLINE_EXCEEDED = "deadline_exceeded"
    DEVICE_SECONDS_EXCEEDED = "device_seconds_exceeded"
    # With FAILED
    STEP_FAILED = "step_failed"  # the step that held it raised
    OWNER_FAILED = "owner_failed"  # its owner gave up on it
    OWNER_LOST = "owner_lost"  # its owner's lease lapsed; in reports only


class AbortReason(StrEnum):
    CLIENT_GONE = "client_gone"
    STOP_STRING = "stop_string"  # the owner found a stop string; Abort.keep says where
    SUPERSEDED = "superseded"  # the owner runs a higher attempt elsewhere
    OWNER_LOST = "owner_lost"  # the owner's lease lapsed; raised by the worker itself
    OWNER_FAILED = "owner_failed"  # the owner gave up on the request and reports it as failed


class Outcome(StrEnum):
    """How an attempt ended, in its AttemptReport."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    EXPIRED = "expired"
    REFUSED = "refused"
    SUPERSEDED = "superseded"
    LOST = "lost"  # never sent by a worker: written by the sweeper for an attempt without a report


class WasteCause(StrEnum):
    """Why device time served nobody. Keys of AttemptReport.wasted_ns."""

    PREEMPTION = "preemption"  # recomputing what a preemption threw away
    STOP_OVERSHOOT = "stop_overshoot"  # tokens after the one that completed a stop string
    FAILED = "failed"  # the whole attempt, because the request failed
    LOST = "lost"  # the whole attempt, because its worker died or its owner did
    SUPERSEDED = "superseded"  # the whole attempt, because a later one took over


class Status(StrEnum):
    """Final status of a request, in its Settlement and its row."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Origin(Message, frozen=True, kw_only=True):
    """Whom a request is for and where it came from: echoed by the worker, so that the books close without the owner.

    ``boot_seq`` is 0 where it is not known: the owner numbers its admissions 1, 2, 3 … after Redis accepted them, so
    the number is in the Settlement only.
    """

    tenant_id: UUID
    api_key_id: UUID
    model: str  # public name
    deployment: str
    revision: str
    endpoint: str  # "/v1/chat/completions"
    stream: bool
    boot_id: str  # the owner's boot
    boot_seq: int = 0
    created_at: float  # when the owner had read the request
    deadline: float
    kind: Kind = Kind.GENERATE
    route: str = ""
    arm: str = ""
    batch_id: UUID | None = None
    trace_id: str = ""  # 32 hex digits, or empty


class Sampling(Message, frozen=True, kw_only=True):
    """How tokens are drawn. Greedy when ``temperature`` is 0. Noise is a function of (seed, choice, position).

    Formulas and order of the penalties and the bias: engine/adjust.py.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int = 0  # always set by the owner, so that a second attempt draws what the first would have drawn
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0  # of tokens of prompt and completion, 0.01..100; 1: off
    presence_penalty: float = 0.0  # of tokens of the completion, -2..2; likewise the next
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # token, -100..100; each token once
    logprobs: int | None = None  # tell of each token drawn, and of so many of the most likely ones; None: no


class Job(Message, frozen=True, kw_only=True, tag="job"):
    """One attempt at one request, in the inbox of one worker boot."""

    request_id: UUID  # version 7, minted by the owner
    attempt: int  # 1, 2, 3 …; a worker drops a job below the highest it has seen for the request
    origin: Origin
    prompt: list[int]
    sampling: Sampling
    generated: list[list[int]] = msgspec.field(default_factory=list)  # by choice: ids an earlier attempt delivered
    klass: JobClass = JobClass.INTERACTIVE
    weight: float = 1.0
    max_device_seconds: float | None = None
    cache_salt: str = ""  # shares cached prefixes with all jobs of this salt; "": with those of its tenant only
    adapter: str = ""
    grammar: str = ""
    traceparent: str = ""
    raw_request: bytes | None = None  # opaque to the engine, for upstream engines that want messages


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """Stop attempts of a request up to and including ``attempt``. An unknown request is not an error."""

    request_id: UUID
    attempt: int
    reason: AbortReason
    keep: int | None = None  # STOP_STRING: completion tokens that count; device time of later ones is waste


Inbound = Job | Abort


class Logprob(Message, frozen=True, kw_only=True, array_like=True):
    """Of one drawn token: natural logarithms of the model's own probabilities, whatever was asked of the draw."""

    logprob: float
    ids: list[int] = msgspec.field(default_factory=list)  # the most likely tokens, the likeliest first
    logprobs: list[float] = msgspec.field(default_factory=list)  # theirs


class Event(Message, frozen=True, kw_only=True, array_like=True):
    """What one step did for one choice of one request. Owners drop events of any attempt but the one they run."""

    request_id: UUID
    attempt: int
    choice: int
    index: int  # position in the completion of ids[0]; an owner that expects another index has missed events
    ids: list[int]
    device_ns: int  # of this attempt so far, used and wasted
    finish: FinishReason | None = None
    cached_tokens: int = 0  # of the prompt, by this attempt so far
    queue_ns: int = 0  # enqueued (stream id) until first scheduled; known from the first event on
    error: str = ""  # an ErrorCode with REFUSED, EXPIRED and FAILED
    logprobs: list[Logprob] | None = None  # of ids, one each, where Sampling.logprobs asks for them


class EventBatch(Message, frozen=True, kw_only=True, tag="events"):
    """One stream entry per step and owner."""

    worker: str
    step: int
    events: list[Event]


class AttemptReport(Message, frozen=True, kw_only=True, tag="attempt"):
    """One per attempt that reached a worker. It settles nothing: cost is computed from it, price never."""

    request_id: UUID
    attempt: int
    origin: Origin
    worker: str  # boot id
    device: str  # identity of the device, e.g. "host-a/cpu"
    device_kind: str  # what a rate is set for, e.g. "cpu", "nvidia-h200"
    outcome: Outcome
    error: str = ""
    # Tokens by kind, from the scheduler's plan: what was computed, not what was asked for.
    prompt_tokens: int = 0  # rows of the prompt and of resumed completion computed for the first time in this attempt
    cached_tokens: int = 0  # rows taken from the prefix cache
    recomputed_tokens: int = 0  # rows computed again after a preemption
    generated_tokens: int = 0  # tokens sampled by this attempt
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    # Stamps.
    received_at: float = 0.0
    finished_at: float = 0.0
    queue_ns: int = 0
    prefill_ns: int = 0  # first scheduled until first token, wall time
    decode_ns: int = 0  # first token until the end, wall time
    # Device time. used and wasted are disjoint; used + Σ wasted = this attempt's shares of all steps.
    used_ns: int = 0
    wasted_ns: dict[str, int] = msgspec.field(default_factory=dict)  # by WasteCause
    kv_block_ns: int = 0  # Σ over held KV blocks of the time held
    steps: int = 0
    preemptions: int = 0
    peak_batch: int = 0  # most sequences in one step with this attempt
    interval: int = 0  # number of the worker's interval in which the attempt closed


class Interval(Message, frozen=True, kw_only=True, tag="interval"):
    """About ten seconds of one device in one worker boot. Intervals are numbered from 1 and contiguous.

    Each category is measured by its own clock spans, none is a residual:
    ``end_ns - start_ns = busy + idle + loading + waste + overhead + unaccounted``.
    ``Σ busy = Σ used_ns of attempts closed in it + open_ns - open_ns of the interval before`` holds exactly: when time
    is reclassified as an attempt closes, the closing interval books the transfer, so a category may be negative in one
    interval.
    """

    worker: str
    device: str
    device_kind: str
    deployment: str
    number: int
    started_at: float
    start_ns: int  # monotonic; equal to end_ns of the interval before
    end_ns: int
    busy_ns: int = 0
    idle_ns: int = 0
    loading_ns: int = 0
    waste_ns: int = 0
    overhead_ns: int = 0
    open_ns: int = 0  # used by attempts still running at end_ns
    # Rows by kind, counted by the executor from its own inputs.
    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    steps: int = 0
    mixed_tenant_steps: int = 0  # steps that held at least two tenants
    last: bool = False  # the worker drained and stopped


class AttemptSeen(Message, frozen=True, kw_only=True):
    """What the owner knew of an attempt, for the sweeper: an attempt whose report never comes is booked as lost."""

    attempt: int
    worker: str
    device: str
    device_kind: str
    device_ns: int


class Settlement(Message, frozen=True, kw_only=True, tag="settlement"):
    """One per admitted request, from its owner, exactly once: ``billed = 0 or delivered <= billed <= generated``."""

    request_id: UUID
    origin: Origin
    status: Status
    finish_reason: str = ""  # as the client saw it: stop, length, cancelled, error
    error_code: str = ""
    winning_attempt: int = 0  # 0: none
    attempts: list[AttemptSeen] = msgspec.field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    delivered_tokens: int = 0  # accepted by the server's send
    billed_tokens: int = 0
    queue_ns: int | None = None
    ttft_ns: int | None = None  # request read until the first content was accepted by send
    tpot_ns: int | None = None  # (last content - first content) / (delivered - 1)
    total_ns: int = 0
    finished_at: float = 0.0


Record = Settlement | AttemptReport | Interval


class WorkerState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class WorkerCard(Message, frozen=True, kw_only=True, tag="worker"):
    """What a worker boot says of itself in the WORKERS hash. Valid while its lease key lives."""

    worker: str  # boot id
    name: str  # stable over restarts and held by one process at a time, e.g. "host-a/worker-0"
    state: WorkerState
    device: str
    device_kind: str
    deployment: str
    model: str  # public name
    revision: str  # digest of weights, configuration and tokenizer
    context_length: int
    default_max_tokens: int
    max_batch: int
    kv_tokens: int  # tokens the KV pool holds: a longer request can never fit
    max_outstanding_tokens: int  # admission refuses beyond it
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    chat_template: str = ""
    special_tokens: dict[str, str] = msgspec.field(default_factory=dict)  # bos_token, eos_token … for the template
    started_at: float = 0.0
    weights: str = "auto"  # arithmetic of the linears; what isn't the default shows in the revision too


def pack(message: Message) -> bytes:
    return _encoder.encode(message)


def unpack_inbound(data: bytes) -> Inbound:
    message: Inbound = _inbound.decode(data)
    return message


def unpack_events(data: bytes) -> EventBatch:
    return _events.decode(data)


def unpack_record(data: bytes) -> Record:
    record: Record = _record.decode(data)
    return record


def unpack_card(data: bytes) -> WorkerCard:
    return _card.decode(data)


_encoder: Final = msgspec.msgpack.Encoder()
_inbound: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(Inbound)
_events: Final = msgspec.msgpack.Decoder(EventBatch)
_record: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(Record)
_card: Final = msgspec.msgpack.Decoder(WorkerCard)
