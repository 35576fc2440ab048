"""The computing half: turns a plan into arrays, runs the decoder on them, draws, and keeps the KV memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch

from engine.draws import Draw
from engine.kernels.attention import AttentionKernel, Scoring, Span
from engine.kernels.device import resolve, use_threads
from engine.kernels.memory import Ints, KvMemory
from engine.kernels.padded import PaddedAttention
from engine.kernels.sparse import SparseAttention
from engine.logprobs import Watch
from engine.models import LoadedModel
from engine.plan import Chunk, ModelLimits, Rows, StepPlan, StepResult
from engine.protocol import Logprob
from engine.sampler import draw

BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """The arrays of one step. Chunks lie in ``order``: single rows first, by length, then longer ones."""

    order: Sequence[int]  # number in the plan of each chunk
    chunks: Sequence[Chunk]
    tokens: Ints  # [rows]
    positions: Ints  # [rows]
    given: Ints  # [rows], of the row's sequence; likewise the next
    watermark: Ints
    drawing: Ints  # rows whose logits are wanted
    spans: Sequence[Span]

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        order = sorted(range(len(plan.chunks)), key=lambda number: _place(plan.chunks[number]))
        chunks = [plan.chunks[number] for number in order]
        counts = [len(chunk.tokens) for chunk in chunks]
        ends = np.cumsum(counts)
        return cls(
            order=order,
            chunks=chunks,
            tokens=np.concatenate([np.asarray(chunk.tokens, dtype=np.int64) for chunk in chunks]),
            positions=np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks]),
            given=np.repeat([chunk.given for chunk in chunks], counts),
            watermark=np.repeat([chunk.watermark for chunk in chunks], counts),
            drawing=ends[[chunk.draws for chunk in chunks]] - 1,
            spans=[
                Span(first=end - count, count=count, start=chunk.start, blocks=np.asarray(chunk.blocks, dtype=np.int64))
                for chunk, count, end in zip(chunks, counts, ends.tolist(), strict=True)
            ],
        )

    def rows(self) -> Rows:
        """By kind, from what is fed. A generated token fed back for the first time is of no kind."""
        again = self.positions < self.watermark
        return Rows(
            prompt=int(np.count_nonzero(~again & (self.positions < self.given))),
            recomputed=int(np.count_nonzero(again)),
            generated=len(self.drawing),
        )


def _place(chunk: Chunk) -> tuple[bool, int]:
    return len(chunk.tokens) > 1, chunk.end


class TorchRunner:
    """Runner over torch. Give ``num_blocks``, or ``kv_memory_bytes`` to have as many blocks as fit.

    Raises ValueError when not one block fits, or the model lies on another device than ``device``.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        device: str = "auto",
        kv_memory_bytes: int | None = None,
        num_blocks: int | None = None,
        block_size: int = BLOCK_SIZE,
        threads: int | None = None,
    ) -> None:
        decoder = model.decoder
        if resolve(device).type != decoder.device.type:
            raise ValueError(f"the model lies on {decoder.device}, the runner was asked for {device}")
        if decoder.device.type == "cpu":
            use_threads(threads)
        per_block = model.config.kept.bytes_per_block(block_size=block_size, dtype=decoder.dtype)
        blocks = num_blocks if num_blocks is not None else (kv_memory_bytes or 0) // per_block
        if blocks < 1:
            raise ValueError(f"not one KV block fits: {kv_memory_bytes or 0} bytes given, a block takes {per_block}")
        self._decoder = decoder
        self._memory = KvMemory(
            model.config.kept, num_blocks=blocks, block_size=block_size, dtype=decoder.dtype, device=decoder.device
        )
        self._attention = choose_attention(self._memory, num_heads=model.config.num_heads, scoring=model.config.scoring)
        self._limits = _limits(model, self._memory)

    @property
    def limits(self) -> ModelLimits:
        return self._limits

    def execute(self, plan: StepPlan) -> StepResult:
        """The device's time is the span from the first array to the last id fetched, which waits for the device."""
        started = time.monotonic_ns()
        feed = Feed.of(plan)
        with torch.inference_mode():
            ids, told = self._run(feed)
        drawn: list[int | None] = [None] * len(plan.chunks)
        drawing = [number for number, chunk in zip(feed.order, feed.chunks, strict=True) if chunk.draws]
        for number, token in zip(drawing, ids, strict=True):
            drawn[number] = token
        logprobs = {drawing[row]: logprob for row, logprob in told.items()}
        return StepResult(drawn=drawn, device_ns=time.monotonic_ns() - started, rows=feed.rows(), logprobs=logprobs)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of every position of a text, to measure quality: [len(tokens), vocabulary]. Overwrites the first blocks."""
        device, count = self._decoder.device, len(tokens)
        blocks = np.arange(-(-count // self._memory.block_size))
        with torch.inference_mode():
            attend = self._attention.prepare([Span(first=0, count=count, start=0, blocks=blocks)])
            positions = torch.arange(count, device=device)
            return self._decoder.forward(torch.tensor(tokens, device=device), positions, attend, positions)

    def _run(self, feed: Feed) -> tuple[list[int], dict[int, Logprob]]:
        """The tokens drawn, and what is told of them by their number among these."""
        device = self._decoder.device
        tokens, positions, drawing = (
            torch.from_numpy(array).to(device) for array in (feed.tokens, feed.positions, feed.drawing)
        )
        attend = self._attention.prepare(feed.spans)
        logits = self._decoder.forward(tokens, positions, attend, drawing)
        draws = [_draw(chunk) for chunk in feed.chunks if chunk.draws]
        watch = Watch.of(logits, draws)
        chosen = draw(logits, draws)
        ids: list[int] = chosen.tolist()
        if device.type == "cuda" and not ids:
            torch.cuda.synchronize(device)  # nothing was fetched that would have waited
        return ids, watch.tell(chosen) if watch else {}


def choose_attention(memory: KvMemory, *, num_heads: int, scoring: Scoring) -> AttentionKernel:
    if memory.keys[0].device.type == "cpu" and memory.keys[0].dtype == torch.float32:
        return SparseAttention(memory, num_heads=num_heads, scoring=scoring)
    return PaddedAttention(memory, num_heads=num_heads, scoring=scoring)


def _draw(chunk: Chunk) -> Draw:
    sampling = chunk.sampling
    return Draw(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        choice=chunk.choice,
        position=chunk.position,
        banned=chunk.banned,
        bias=sampling.logit_bias,
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        seen=chunk.seen,
        allowed=chunk.allowed,
        logprobs=sampling.logprobs,
    )


def _limits(model: LoadedModel, memory: KvMemory) -> ModelLimits:
    return ModelLimits(
        context_length=model.context_length,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.eos_token_ids,
        block_size=memory.block_size,
        num_blocks=memory.num_blocks,
        macs_per_row=model.config.macs_per_row,
        macs_per_attended=model.config.macs_per_attended,
        macs_per_draw=model.config.macs_per_draw,
    )
