"""Attention of one step put together: store the new rows, then single rows at once and longer spans one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.kernels.attention import Scoring, Span
from engine.kernels.chunk import ChunkAttention
from engine.kernels.memory import KvMemory

Singles = Callable[[int, Tensor], Tensor]


class SinglesMaker(Protocol):
    def __call__(
        self,
        memory: KvMemory,
        spans: Sequence[Span],
        *,
        num_heads: int,
        scoring: Scoring,
        window: int | None,
    ) -> Singles:
        """Attention of single rows, within a window where one is given."""
        ...


class SpannedAttention:
    """StepAttention over any mix of spans.

    What a step needs is built once per window and not per layer; where no span is longer than a window, layers with
    and without it share.
    """

    def __init__(
        self, memory: KvMemory, spans: Sequence[Span], *, num_heads: int, scoring: Scoring, singles: SinglesMaker
    ) -> None:
        self._memory = memory
        self._new_rows = _new_rows(memory, spans)
        longest = max(span.end for span in spans)
        windows = [None if window is None or longest <= window else window for window in scoring.windows]
        views = {
            window: _View(memory, spans, num_heads=num_heads, scoring=scoring, window=window, singles=singles)
            for window in dict.fromkeys(windows)
        }
        self._views = [views[window] for window in windows]  # by layer

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        self._memory.rows[layer].index_put_((self._new_rows,), qkv[:, -2 * self._memory.heads :])
        return self._views[layer](layer, qkv)


class _View:
    """The rows of a step, looking back through one window."""

    def __init__(
        self,
        memory: KvMemory,
        spans: Sequence[Span],
        *,
        num_heads: int,
        scoring: Scoring,
        window: int | None,
        singles: SinglesMaker,
    ) -> None:
        single = [span for span in spans if span.count == 1]
        self._single_count = len(single)
        self._singles = singles(memory, single, num_heads=num_heads, scoring=scoring, window=window) if single else None
        self._chunks = [
            ChunkAttention(memory, span, num_heads=num_heads, scoring=scoring, window=window)
            for span in spans[len(single) :]
        ]

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        parts = [chunk(layer, qkv) for chunk in self._chunks]
        if self._singles is not None:
            parts.insert(0, self._singles(layer, qkv[: self._single_count]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _new_rows(memory: KvMemory, spans: Sequence[Span]) -> Tensor:
    """Where each row's keys and values go: int64 [rows, 2 · kv heads]."""
    first = np.concatenate([memory.rows_of(span.blocks, np.arange(span.start, span.end)) for span in spans])
    keys = memory.heads_from(first)
    return torch.from_numpy(np.concatenate([keys, keys + memory.num_rows], axis=1)).to(memory.keys[0].device)
