"""What one step shall do, and what it did: the frozen border between the deciding half and the computing half.

The scheduler decides a StepPlan without touching a device; the runner carries it out and answers with a StepResult.
There is no prefill phase and no decode phase: a chunk is whatever part of a sequence's tokens has no KV yet and fits
the step's token budget, so a new prompt, a chunk of one, a decode step and a resumption after preemption are one case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from uuid import UUID

from engine.protocol import Logprob, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows [start, start + len(tokens)) of one sequence. A row is one input token at one position."""

    request_id: UUID
    choice: int
    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]  # block table: block i holds positions [i * block_size, (i + 1) * block_size)
    given: (
        int  # length of what the attempt was given: the prompt and the completion it resumes; rows below are "prompt"
    )
    watermark: int  # rows below were there before and lost by a preemption: they are "recomputed"
    draws: bool  # the last row's logits give the next token: true when the chunk catches up with the sequence
    position: int  # index in the completion of the token drawn: with seed and choice it determines the noise
    sampling: Sampling
    banned: Sequence[int] = ()  # ids that must not be drawn (end of sequence before min_tokens)
    seen: Sequence[int] = ()  # what penalties look at; its last ``position`` tokens are the completion so far
    allowed: bytes | None = None  # structured output: bit t % 8 of byte t // 8 says whether token t may be drawn

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    number: int
    chunks: Sequence[Chunk]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one step by kind, counted by the executor from the arrays it fed to the device."""

    prompt: int = 0
    recomputed: int = 0
    generated: int = 0  # tokens drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    drawn: Sequence[int | None]  # one per chunk; None where the chunk did not draw
    device_ns: int  # time of the device for this step
    rows: Rows
    logprobs: Mapping[int, Logprob] = field(default_factory=dict)  # by number of the chunk, where they were asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What the deciding half must know of a model and its memory."""

    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    # Multiply-adds, for the meter's weights: per row outside attention, and per (row, attended position) inside it.
    macs_per_row: int
    macs_per_attended: int
    macs_per_draw: int = 0  # on top for each row that draws: only those pass the head


class Runner(Protocol):
    """The computing half. Block memory belongs to it; which block holds what belongs to the KV manager."""

    @property
    def limits(self) -> ModelLimits: ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises only on bugs and device errors; the plan fits by construction."""
        ...
