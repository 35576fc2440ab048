"""Paged attention on the CPU without gathering and without padding.

For single rows, scores are a matrix product of which only some entries are wanted, and the result is a weighted sum
of some rows: torch has both as operations that read rows of memory by number, `sampled_addmm` over a CSR pattern and
`embedding_bag`. The pattern names, for each (sequence, head), the rows of its positions.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kernels.attention import Scoring, Span
from engine.kernels.memory import Ints, KvMemory
from engine.kernels.spans import SpannedAttention

with warnings.catch_warnings():
    # Said once per process: the layout is in beta. Tests hold the operations used here against plain attention.
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0], [], [], size=(0, 0))


class SparseAttention:
    def __init__(self, memory: KvMemory, *, num_heads: int, scoring: Scoring | None = None) -> None:
        self._memory = memory
        self._num_heads = num_heads
        self._scoring = scoring or Scoring.plain(memory)

    def prepare(self, spans: Sequence[Span]) -> SpannedAttention:
        return SpannedAttention(
            self._memory, spans, num_heads=self._num_heads, scoring=self._scoring, singles=SparseSingles
        )


class SparseSingles:
    """One row of each of several sequences. Every sequence's result depends on its own numbers only."""

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
        self._softcap = scoring.softcap
        self._scale = scoring.scale / (scoring.softcap or 1.0)
        lengths = np.array([span.end - span.seen_from(window) for span in spans])
        columns = np.concatenate([_columns(memory, span, num_heads=num_heads, window=window) for span in spans])
        bounds = np.concatenate([[0], np.cumsum(np.repeat(lengths, num_heads))])
        index = np.int32 if memory.num_rows < 2**31 else np.int64
        self._columns = torch.from_numpy(columns.astype(index))
        self._bounds = torch.from_numpy(bounds.astype(index))
        self._scores = torch.zeros(len(columns), dtype=memory.keys[0].dtype)
        self._pattern = torch.sparse_csr_tensor(
            self._bounds,
            self._columns,
            self._scores,  # shared, not copied: the product lands here
            size=(len(spans) * num_heads, memory.num_rows),
            check_invariants=False,
        )
        self._equally_long = list(_equally_long(self._scores, lengths, num_heads=num_heads))

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """qkv: the single rows. Returns [n, heads · head size]."""
        queries = qkv[:, : self._num_heads].reshape(-1, self._memory.head_dim)
        torch.sparse.sampled_addmm(
            self._pattern, queries, self._memory.keys[layer].t(), beta=0.0, alpha=self._scale, out=self._pattern
        )
        if self._softcap is not None:
            self._scores.tanh_().mul_(self._softcap)
        for scores in self._equally_long:
            torch.softmax(scores, -1, out=scores)
        out = torch.embedding_bag(
            self._memory.values[layer],
            self._columns,
            self._bounds,
            mode=0,  # sum
            per_sample_weights=self._scores,
            include_last_offset=True,
        )[0]
        return out.view(len(qkv), -1)


def _columns(memory: KvMemory, span: Span, *, num_heads: int, window: int | None) -> Ints:
    """Rows that each head of a sequence attends to, head after head: [heads · length]."""
    first = memory.rows_of(span.blocks, np.arange(span.seen_from(window), span.end))
    heads = memory.heads_from(first).T  # [kv heads, length]
    return np.repeat(heads, num_heads // memory.heads, axis=0).reshape(-1)


def _equally_long(scores: Tensor, lengths: Ints, *, num_heads: int) -> Iterator[Tensor]:
    """Views [rows, length] of neighbours that attend to equally many positions: softmax does each at once."""
    at = 0
    for length, group in itertools.groupby(lengths.tolist()):
        rows = num_heads * sum(1 for _ in group)
        yield scores[at : at + rows * length].view(rows, length)
        at += rows * length
