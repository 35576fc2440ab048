"""Dense attention for a span of several rows: a prompt or a part of one."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.kernels.attention import Scoring, Span
from engine.kernels.dense import attend, causal_mask
from engine.kernels.memory import KvMemory


class ChunkAttention:
    """One span against what it sees before it. What it needs per step is built here, once for all layers alike."""

    def __init__(
        self, memory: KvMemory, span: Span, *, num_heads: int, scoring: Scoring, window: int | None = None
    ) -> None:
        self._memory = memory
        self._span = span
        self._num_heads = num_heads
        self._scoring = scoring
        skipped = span.seen_from(window) // memory.block_size
        self._length = span.end - skipped * memory.block_size  # positions that are gathered and still count
        # With nothing before it, the new rows are the whole sequence and nothing has to be gathered.
        self._stretches = _stretches(memory, span, skipped) if span.start else None
        narrow = window if window is not None and span.end > window else None
        self._mask = None
        if span.start or narrow or scoring.softcap is not None:
            self._mask = causal_mask(
                span.count, self._length, like=memory.keys[0], before=self._length - span.count, window=narrow
            )

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """qkv: all rows of the step. Returns [span.count, heads · head size]."""
        rows = qkv[self._span.first : self._span.first + self._span.count].transpose(0, 1)
        if self._stretches is None:
            keys, values = rows[self._num_heads :].chunk(2)
        else:
            keys, values = self._gather(layer, self._stretches)
        queries = rows[: self._num_heads].unsqueeze(0)
        out = attend(queries, keys.unsqueeze(0), values.unsqueeze(0), mask=self._mask, scoring=self._scoring)
        return out[0].transpose(0, 1).reshape(self._span.count, -1)

    def _gather(self, layer: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the sequence, [kv heads, length, head size] each."""
        memory = self._memory
        stretches = memory.rows[layer].view(-1, memory.block_size * memory.head_dim)
        gathered = stretches.index_select(0, numbers).view(2, memory.heads, -1, memory.head_dim)
        return gathered[0, :, : self._length], gathered[1, :, : self._length]


def _stretches(memory: KvMemory, span: Span, skipped: int) -> Tensor:
    """Numbers of the stretches of the sequence's keys, then of its values: int64 [2 · kv heads · blocks]."""
    keys = memory.stretches_of(span.blocks[skipped : -(-span.end // memory.block_size)])
    both = np.stack([keys, keys + memory.num_blocks * memory.heads])
    return torch.from_numpy(both.reshape(-1)).to(memory.keys[0].device)
