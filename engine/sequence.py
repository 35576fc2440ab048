"""One choice of one attempt on its way: which tokens are known, and of which the KV exists.

    tokens   [0 ············ prompt ······ given ············ len(tokens))
              what the job asks     resumed       drawn by this attempt
    KV       [0 ······· computed)           rows that the block table holds, by computing or from the prefix cache
    lost     [computed ······· watermark)   rows it had once, which a preemption threw away

Ranges are half-open. ``tokens`` only grows. ``computed`` grows with every step and falls with a preemption, to what the
prefix cache still holds when it comes back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

from engine.kv import Chain
from engine.plan import Chunk
from engine.protocol import FinishReason, Job, JobClass, Logprob

_RANK = {klass: rank for rank, klass in enumerate(JobClass)}


class Place(Enum):
    OUTSIDE = auto()  # of the scheduler: not yet or no longer with it
    WAITING = auto()
    RUNNING = auto()


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Sequence:
    job: Job
    choice: int = 0
    arrival: int  # 0, 1, 2 … in the order in which the engine took them
    tokens: list[int]
    prompt: int
    given: int
    computed: int = 0
    watermark: int = 0
    cached: int = 0  # rows that this attempt first had from the prefix cache; it never computes them as prompt
    cached_prompt: int = 0  # those of them that are tokens of the prompt
    chain: Chain = field(init=False)
    turn: float = 0.0  # counter of its tenant when it was first admitted (see engine.waiting)
    place: Place = Place.OUTSIDE
    preemptions: int = 0
    kv_block_ns: int = 0  # Σ over held blocks of the time held, up to the last release
    # Monotonic nanoseconds; None: has not happened
    received_at: float  # UTC seconds
    received_ns: int
    inbox_ns: int  # waited in the inbox stream before that
    scheduled_ns: int | None = None
    first_token_ns: int | None = None
    logprobs: list[Logprob] | None = None  # of what the last step drew

    def __post_init__(self) -> None:
        self.chain = Chain(salt_of(self.job))

    @property
    def missing(self) -> int:
        """Rows to compute before the next token can be drawn."""
        return len(self.tokens) - self.computed

    @property
    def completion(self) -> int:
        """Tokens of the completion so far, resumed ones included; the index and noise position of the next."""
        return len(self.tokens) - self.prompt

    @property
    def queue_ns(self) -> int:
        return 0 if self.scheduled_ns is None else self.inbox_ns + self.scheduled_ns - self.received_ns

    @property
    def resumed(self) -> int:
        return self.given - self.prompt

    @property
    def weight(self) -> float:
        """Its tenant's share of a contended worker. What is no share counts as one."""
        weight = self.job.weight
        return weight if 0 < weight < math.inf else 1.0

    def order(self) -> tuple[int, float, int]:
        """Who goes first: class, then whose tenant had been served less when it was its turn, then arrival."""
        return _RANK[self.job.klass], self.turn, self.arrival

    def take_up(self, rows: int) -> None:
        """Rows [0, rows) were found in the prefix cache. What a preemption threw away is just there again."""
        self.cached += max(0, rows - self.watermark)
        self.cached_prompt += max(0, min(rows, self.prompt) - self.watermark)
        self.computed = rows
        self.watermark = max(self.watermark, rows)

    def chunk(self, rows: int, blocks: list[int], eos: tuple[int, ...]) -> Chunk:
        start = self.computed
        end = start + rows
        return Chunk(
            request_id=self.job.request_id,
            choice=self.choice,
            tokens=self.tokens[start:end],
            start=start,
            blocks=tuple(blocks),
            given=self.given,
            watermark=self.watermark,
            draws=end == len(self.tokens),
            position=self.completion,
            sampling=self.job.sampling,
            banned=self._banned(eos),
            seen=self._seen() if end == len(self.tokens) else (),
        )

    def advance(self, chunk: Chunk, token: int | None) -> None:
        """The chunk has run: its rows have KV, and it drew ``token`` if it caught up."""
        self.computed = chunk.end
        self.watermark = max(self.watermark, self.computed)
        if token is not None:
            self.tokens.append(token)

    def finish(self, eos: tuple[int, ...]) -> FinishReason | None:
        """Whether the last known token ends the completion. Also says it of a resumed completion that had ended."""
        sampling = self.job.sampling
        if self.completion:
            last = self.tokens[-1]
            if last in sampling.stop_token_ids or (last in eos and not sampling.ignore_eos):
                return FinishReason.STOP
        return FinishReason.LENGTH if self.completion >= sampling.max_tokens else None

    def _banned(self, eos: tuple[int, ...]) -> tuple[int, ...]:
        """What would end the completion must not be drawn before ``min_tokens``."""
        sampling = self.job.sampling
        if self.completion >= sampling.min_tokens:
            return ()
        return sampling.stop_token_ids if sampling.ignore_eos else eos + sampling.stop_token_ids

    def _seen(self) -> tuple[int, ...]:
        """What the penalties look at. It comes with every draw, so that a resumed attempt draws the same."""
        sampling = self.job.sampling
        if sampling.repetition_penalty != 1:
            return tuple(self.tokens)
        penalised = sampling.presence_penalty or sampling.frequency_penalty
        return tuple(self.tokens[self.prompt :]) if penalised else ()


def salt_of(job: Job) -> str:
    """Who may share prefixes with this job: its tenant alone, or with a salt whoever has the same. What is cached shows
    in the time to the first token and on the bill, so across tenants it tells who had asked what.
    """
    return f"shared:{job.cache_salt}" if job.cache_salt else f"tenant:{job.origin.tenant_id}"
