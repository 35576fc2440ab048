"""The border between a decoder and whatever computes attention over paged memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from engine.kernels.memory import Ints, KvMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Rows [first, first + count) of a step belong to one sequence, at positions [start, start + count)."""

    first: int
    count: int
    start: int
    blocks: Ints  # block table; holds at least ``end`` positions

    @property
    def end(self) -> int:
        return self.start + self.count

    def seen_from(self, window: int | None) -> int:
        """The first position that any of the rows attends to."""
        return 0 if window is None else max(0, self.start + 1 - window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How a query scores a key: scale · q · k, bent by a soft cap, within the window of the layer."""

    scale: float
    softcap: float | None = None  # c: the score s becomes c · tanh(s / c)
    windows: Sequence[int | None] = ()  # by layer: a row sees so many positions, its own included; None: all before it

    @classmethod
    def plain(cls, memory: KvMemory) -> Self:
        return cls(scale=memory.head_dim**-0.5, windows=(None,) * len(memory.rows))


class StepAttention(Protocol):
    """Attention of one step, its index tensors built. Called once per layer, in order."""

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """Store the new keys and values, then attend.

        qkv: [rows, heads + 2 · kv heads, head size], rotated. Returns [rows, heads · head size].
        """
        ...


class AttentionKernel(Protocol):
    def prepare(self, spans: Sequence[Span]) -> StepAttention:
        """``spans`` cover the rows of the step without gap; those of a single row come first."""
        ...
