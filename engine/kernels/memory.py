"""Where keys and values of all layers rest: blocks of positions, with one head of one block in one stretch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]

_KEYS_AND_VALUES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What a model keeps of one position."""

    layers: int
    heads: int
    head_dim: int

    def bytes_per_block(self, *, block_size: int, dtype: torch.dtype) -> int:
        return self.layers * _KEYS_AND_VALUES * self.heads * self.head_dim * block_size * dtype.itemsize


class KvMemory:
    """float [layers, 2 (keys, values), blocks, kv heads, block size, head size].

    A *row* is the vector of one position for one head; rows of a layer are numbered over [blocks, kv heads, block
    size], keys first, then as many of values. One head of a block is one stretch of memory, so gathering a sequence
    for dense attention copies whole stretches, and sparse attention reads rows by number without any copy.
    """

    def __init__(
        self, kept: KvShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.heads = kept.heads
        self.head_dim = kept.head_dim
        shape = (kept.layers, _KEYS_AND_VALUES, num_blocks, self.heads, block_size, self.head_dim)
        self._all = torch.zeros(shape, dtype=dtype, device=device)
        self.rows = self._all.view(kept.layers, -1, self.head_dim).unbind(0)  # per layer [keys then values, D]
        self.keys = self._all[:, 0].flatten(1, 3).unbind(0)  # per layer [rows, D]
        self.values = self._all[:, 1].flatten(1, 3).unbind(0)
        self.num_rows = num_blocks * self.heads * block_size

    def rows_of(self, blocks: Ints, positions: Ints) -> Ints:
        """Numbers of the rows of head 0. ``blocks`` is the block table of the sequence, ``positions`` lie in it."""
        block, offset = np.divmod(positions, self.block_size)
        first: Ints = blocks[block] * (self.heads * self.block_size) + offset
        return first

    def heads_from(self, first: Ints) -> Ints:
        """[n] numbers of head 0 → [n, kv heads]."""
        every: Ints = first[:, None] + np.arange(self.heads) * self.block_size
        return every

    def stretches_of(self, blocks: Ints) -> Ints:
        """[kv heads, blocks]: numbers of the stretches, of ``block_size`` rows each, that hold a sequence."""
        every: Ints = np.arange(self.heads)[:, None] + blocks * self.heads
        return every
