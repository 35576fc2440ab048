"""Dense attention for a span of several rows: a prompt or a part of one."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.attention import Span
from engine.kernels.memory import KvMemory


class ChunkAttention:
    """One span against everything before it. What it needs per step is built here, once for all layers."""

    def __init__(self, memory: KvMemory, span: Span, *, num_heads: int) -> None:
        self._memory = memory
        self._span = span
        self._num_heads = num_heads
        self._grouped = num_heads != memory.heads
        # With nothing before it, the new rows are the whole sequence and nothing has to be gathered.
        self._stretches = _stretches(memory, span) if span.start else None
        self._mask = _causal_mask(span, like=memory.keys[0]) if span.start else None

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """qkv: all rows of the step. Returns [span.count, heads · head size]."""
        rows = qkv[self._span.first : self._span.first + self._span.count].transpose(0, 1)
        queries = rows[: self._num_heads]
        if self._stretches is None:
            keys, values = rows[self._num_heads :].chunk(2)
        else:
            keys, values = self._gather(layer, self._stretches)
        out = functional.scaled_dot_product_attention(
            queries.unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=self._mask,
            is_causal=self._mask is None,
            enable_gqa=self._grouped,
        )
        return out[0].transpose(0, 1).reshape(self._span.count, -1)

    def _gather(self, layer: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the sequence, [kv heads, end, head size] each."""
        memory = self._memory
        stretches = memory.rows[layer].view(-1, memory.block_size * memory.head_dim)
        gathered = stretches.index_select(0, numbers).view(2, memory.heads, -1, memory.head_dim)
        return gathered[0, :, : self._span.end], gathered[1, :, : self._span.end]


def _stretches(memory: KvMemory, span: Span) -> Tensor:
    """Numbers of the stretches of the sequence's keys, then of its values: int64 [2 · kv heads · blocks]."""
    keys = memory.stretches_of(span.blocks[: -(-span.end // memory.block_size)])
    both = np.stack([keys, keys + memory.num_blocks * memory.heads])
    return torch.from_numpy(both.reshape(-1)).to(memory.keys[0].device)


def _causal_mask(span: Span, *, like: Tensor) -> Tensor:
    """Row i sees positions up to start + i: 0 there, -inf beyond; [count, end]."""
    mask = torch.full((span.count, span.end), float("-inf"), dtype=like.dtype, device=like.device)
    return mask.triu_(span.start + 1)
