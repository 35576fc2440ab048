"""Attention of one step put together: store the new rows, then single rows at once and longer spans one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kernels.attention import Span
from engine.kernels.chunk import ChunkAttention
from engine.kernels.memory import KvMemory


class SpannedAttention:
    """StepAttention over any mix of spans, with one callable for all of its single rows."""

    def __init__(
        self,
        memory: KvMemory,
        spans: Sequence[Span],
        *,
        singles: Callable[[int, Tensor], Tensor] | None,
        chunks: Sequence[ChunkAttention],
    ) -> None:
        self._memory = memory
        self._new_rows = _new_rows(memory, spans)
        self._singles = singles
        self._single_count = len(spans) - len(chunks)
        self._chunks = chunks

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        self._memory.rows[layer].index_put_((self._new_rows,), qkv[:, -2 * self._memory.heads :])
        parts = [chunk(layer, qkv) for chunk in self._chunks]
        if self._singles is not None:
            parts.insert(0, self._singles(layer, qkv[: self._single_count]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _new_rows(memory: KvMemory, spans: Sequence[Span]) -> Tensor:
    """Where each row's keys and values go: int64 [rows, 2 · kv heads]."""
    first = np.concatenate([memory.rows_of(span.blocks, np.arange(span.start, span.end)) for span in spans])
    keys = memory.heads_from(first)
    return torch.from_numpy(np.concatenate([keys, keys + memory.num_rows], axis=1)).to(memory.keys[0].device)
