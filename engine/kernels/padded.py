"""Paged attention in plain torch, on any device: single rows are padded to the longest context among them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.attention import Span
from engine.kernels.chunk import ChunkAttention
from engine.kernels.memory import KvMemory
from engine.kernels.spans import SpannedAttention


class PaddedAttention:
    def __init__(self, memory: KvMemory, *, num_heads: int) -> None:
        self._memory = memory
        self._num_heads = num_heads

    def prepare(self, spans: Sequence[Span]) -> SpannedAttention:
        singles = [span for span in spans if span.count == 1]
        return SpannedAttention(
            self._memory,
            spans,
            singles=PaddedSingles(self._memory, singles, num_heads=self._num_heads) if singles else None,
            chunks=[ChunkAttention(self._memory, span, num_heads=self._num_heads) for span in spans[len(singles) :]],
        )


class PaddedSingles:
    """One row of each of several sequences."""

    def __init__(self, memory: KvMemory, spans: Sequence[Span], *, num_heads: int) -> None:
        self._memory = memory
        self._num_heads = num_heads
        self._grouped = num_heads != memory.heads
        ends = np.array([span.end for span in spans])
        positions = np.arange(ends.max())
        live = positions < ends[:, None]
        # Padding reads the sequence's own first position, so that no other's values can come near its sum.
        padded = np.where(live, positions, 0)
        first = np.stack([memory.rows_of(span.blocks, row) for span, row in zip(spans, padded, strict=True)])
        every = first[:, None] + (np.arange(memory.heads) * memory.block_size)[None, :, None]
        device = memory.keys[0].device
        self._rows = torch.from_numpy(every).to(device)  # [n, kv heads, longest]
        self._mask = torch.from_numpy(live[:, None, None]).to(device)

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """qkv: the single rows. Returns [n, heads · head size]."""
        out = functional.scaled_dot_product_attention(
            qkv[:, : self._num_heads].unsqueeze(2),
            self._memory.keys[layer][self._rows],
            self._memory.values[layer][self._rows],
            attn_mask=self._mask,
            enable_gqa=self._grouped,
        )
        return out.flatten(1)
