"""Paged attention in plain torch, on any device: single rows are padded to the longest context among them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kernels.attention import Scoring, Span
from engine.kernels.dense import attend
from engine.kernels.memory import KvMemory
from engine.kernels.spans import SpannedAttention


class PaddedAttention:
    def __init__(self, memory: KvMemory, *, num_heads: int, scoring: Scoring | None = None) -> None:
        self._memory = memory
        self._num_heads = num_heads
        self._scoring = scoring or Scoring.plain(memory)

    def prepare(self, spans: Sequence[Span]) -> SpannedAttention:
        return SpannedAttention(
            self._memory, spans, num_heads=self._num_heads, scoring=self._scoring, singles=PaddedSingles
        )


class PaddedSingles:
    """One row of each of several sequences."""

    def __init__(
        self,
        memory: KvMemory,
        spans: Sequence[Span],
        *,
        num_heads: int,
        scoring: Scoring,
        window: int | None = None,
    ) -> None:
        self._memory = memory
        self._num_heads = num_heads
        self._scoring = scoring
        starts = np.array([span.seen_from(window) for span in spans])[:, None]
        ends = np.array([span.end for span in spans])[:, None]
        positions = starts + np.arange((ends - starts).max())
        live = positions < ends
        # Padding reads a position of the sequence's own, so that no other's values can come near its sum.
        padded = np.where(live, positions, starts)
        first = np.stack([memory.rows_of(span.blocks, row) for span, row in zip(spans, padded, strict=True)])
        every = first[:, None] + (np.arange(memory.heads) * memory.block_size)[None, :, None]
        keys = memory.keys[0]
        self._rows = torch.from_numpy(every).to(keys.device)  # [n, kv heads, longest]
        hidden = np.where(live, 0.0, -np.inf)[:, None, None]
        self._mask = torch.from_numpy(hidden).to(device=keys.device, dtype=keys.dtype)

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """qkv: the single rows. Returns [n, heads · head size]."""
        out = attend(
            qkv[:, : self._num_heads].unsqueeze(2),
            self._memory.keys[layer][self._rows],
            self._memory.values[layer][self._rows],
            mask=self._mask,
            scoring=self._scoring,
        )
        return out.flatten(1)
