"""A tiny exact world for the deciding half: a model whose next token is a hash of what it finds in its paged memory.

A wrong block table, a lost or shared block, a wrong position or a row computed twice into the wrong place changes the
tokens that come out, so equality of tokens is equality of everything the KV manager and the scheduler decide.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID

from engine.config import EngineConfig
from engine.core import Engine, StepOutput
from engine.meter import Identity, Meter
from engine.plan import Chunk, ModelLimits, Rows, StepPlan, StepResult
from engine.protocol import AttemptReport, Event, Interval, Job, JobClass, Kind, Origin, Sampling
from engine.timeline import Span, Timeline

VOCABULARY = 97
EOS = 0
TENANT_A, TENANT_B = UUID(int=0xA), UUID(int=0xB)
_ids = itertools.count(1)


class Clock:
    """Monotonic nanoseconds that pass only when told, and one nanosecond at each look."""

    def __init__(self) -> None:
        self.ns = 1_000_000

    def __call__(self) -> int:
        self.ns += 1
        return self.ns

    def wall(self) -> float:
        return 1_700_000_000 + self.ns / 1e9


def limits(*, num_blocks: int = 16, block_size: int = 4, context_length: int = 64) -> ModelLimits:
    return ModelLimits(
        context_length=context_length,
        vocab_size=VOCABULARY,
        eos_token_ids=(EOS,),
        block_size=block_size,
        num_blocks=num_blocks,
        macs_per_row=1000,
        macs_per_attended=3,
        macs_per_draw=250,
    )


def next_token(known: list[int], banned: tuple[int, ...] = ()) -> int:
    """What this model says after ``known``: never the end of sequence by itself, unless the hash hits it."""
    token = zlib.crc32(bytes(known)) % VOCABULARY
    while token in banned:
        token = (token + 1) % VOCABULARY
    return token


def completion_of(prompt: list[int], length: int, *, min_tokens: int = 0, ignore_eos: bool = True) -> list[int]:
    """The tokens that a request must get, computed without an engine."""
    known = list(prompt)
    while len(known) - len(prompt) < length:
        ban = (EOS,) if len(known) - len(prompt) < min_tokens and not ignore_eos else ()
        known.append(next_token(known, ban))
        if known[-1] == EOS and not ignore_eos:
            break
    return known[len(prompt) :]


@dataclass
class HashRunner:
    limits: ModelLimits
    clock: Clock
    duration_ns: Callable[[StepPlan], int] = lambda plan: 1_000 + 100 * sum(len(c.tokens) for c in plan.chunks)
    raises: list[Exception | None] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    memory: dict[int, tuple[int, int]] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        device_ns = self.duration_ns(plan)
        self.clock.ns += device_ns
        if self.raises and (error := self.raises.pop(0)):
            raise error
        for chunk in plan.chunks:
            for position, token in enumerate(chunk.tokens, chunk.start):
                self.memory[self._slot(chunk, position)] = (position, token)
        drawn = [self._draw(chunk) if chunk.draws else None for chunk in plan.chunks]
        return StepResult(drawn=drawn, device_ns=device_ns, rows=self._rows(plan, drawn))

    def _slot(self, chunk: Chunk, position: int) -> int:
        return chunk.blocks[position // self.limits.block_size] * self.limits.block_size + (
            position % self.limits.block_size
        )

    def _draw(self, chunk: Chunk) -> int:
        cells = [self.memory[self._slot(chunk, position)] for position in range(chunk.end)]
        assert [position for position, _ in cells] == list(range(chunk.end)), "rows of another sequence or position"
        return next_token([token for _, token in cells], tuple(chunk.banned))

    def _rows(self, plan: StepPlan, drawn: list[int | None]) -> Rows:
        kinds = [
            "recomputed" if p < c.watermark else "prompt" if p < c.given else "decode"
            for c in plan.chunks
            for p in range(c.start, c.end)
        ]
        return Rows(
            prompt=kinds.count("prompt"),
            recomputed=kinds.count("recomputed"),
            generated=sum(token is not None for token in drawn),
        )


class World:
    """An engine over a HashRunner, and everything that came out of it."""

    def __init__(self, config: EngineConfig | None = None, model: ModelLimits | None = None) -> None:
        self.clock = Clock()
        self.runner = HashRunner(model or limits(), self.clock)
        meter = Meter(
            Identity(worker="w1", device="host/cpu", device_kind="cpu", deployment="m"),
            Timeline(Span.OVERHEAD, self.clock),
            fixed_rows=16,
            wall=self.clock.wall,
        )
        config = config or EngineConfig(max_batch=4, step_tokens=8)
        self.engine = Engine(self.runner, meter, config, wall=self.clock.wall)
        self.events: list[Event] = []
        self.reports: list[AttemptReport] = []
        self.intervals: list[Interval] = []
        self.outputs: list[StepOutput] = []

    def step(self) -> StepOutput:
        output = self.engine.step()
        self.engine.check_integrity()
        self.outputs.append(output)
        self.events += [event for events in output.events.values() for event in events]
        self.reports += [ended.report for ended in output.ended]
        return output

    def run(self, limit: int = 10_000) -> World:
        """Until nothing is left to do, which must come."""
        for _ in range(limit):
            if not self.engine.has_work:
                return self
            self.step()
        raise AssertionError(f"still working after {limit} steps")

    def cut(self, *, last: bool = False) -> Interval:
        self.intervals.append(self.engine.meter.cut(last=last))
        return self.intervals[-1]

    def tokens(self, job: Job) -> list[int]:
        """What the owner of this attempt has received, indices checked."""
        ids = list(job.generated[0]) if job.generated else []
        for event in self.events:
            if (event.request_id, event.attempt) == (job.request_id, job.attempt):
                assert event.index == len(ids)
                ids += event.ids
        return ids

    def last_event(self, job: Job) -> Event:
        return [e for e in self.events if (e.request_id, e.attempt) == (job.request_id, job.attempt)][-1]

    def report(self, job: Job) -> AttemptReport:
        (found,) = [r for r in self.reports if (r.request_id, r.attempt) == (job.request_id, job.attempt)]
        return found

    @property
    def scheduled(self) -> list[list[tuple[UUID, int]]]:
        """For each step that ran, who had how many rows, in order."""
        return [[(c.request_id, len(c.tokens)) for c in plan.chunks] for plan in self.runner.plans]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    noise = random.Random(f"{length} {seed}")
    return [noise.randrange(1, VOCABULARY) for _ in range(length)]


def job(
    prompt: list[int] | int = 5,
    max_tokens: int = 4,
    *,
    request_id: UUID | None = None,
    attempt: int = 1,
    generated: list[int] | None = None,
    klass: JobClass = JobClass.INTERACTIVE,
    tenant: UUID = TENANT_A,
    owner: str = "api-1",
    deadline: float = 4e9,
    kind: Kind = Kind.GENERATE,
    max_device_seconds: float | None = None,
    adapter: str = "",
    grammar: str = "",
    traceparent: str = "",
    ignore_eos: bool = True,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    weight: float = 1.0,
    cache_salt: str = "",
) -> Job:
    """``prompt``: its tokens, or how many, which then no other job has."""
    number = next(_ids)
    return Job(
        request_id=request_id or UUID(int=number),
        attempt=attempt,
        origin=Origin(
            tenant_id=tenant,
            api_key_id=UUID(int=1),
            model="m",
            deployment="m",
            revision="r",
            endpoint="/v1/completions",
            stream=True,
            boot_id=owner,
            created_at=0.0,
            deadline=deadline,
            kind=kind,
        ),
        prompt=prompt_of(prompt, number) if isinstance(prompt, int) else prompt,
        sampling=Sampling(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
        ),
        generated=[generated] if generated is not None else [],
        klass=klass,
        weight=weight,
        cache_salt=cache_salt,
        max_device_seconds=max_device_seconds,
        adapter=adapter,
        grammar=grammar,
        traceparent=traceparent,
    )
