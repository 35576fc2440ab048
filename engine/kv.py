"""Who holds which block of KV memory. The memory itself is the runner's.

    pool     [0 ········· num_blocks)       block numbers; each is free or in exactly one table
    table    block i of a sequence holds its rows [i * block_size, (i + 1) * block_size)

The manager owns all blocks. A sequence gets blocks by ``reserve`` and loses them all by ``release``: when it ends and
when it is preempted, both said by the scheduler. Nobody else takes or frees.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from uuid import UUID

Key = tuple[UUID, int]  # request and choice


class BlockPool:
    """Free blocks, the last freed first: its memory is the warmest."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """``None``: no room, and nothing is taken."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        self._free.extend(reversed(blocks))

    def free_blocks(self) -> list[int]:
        return list(self._free)


@dataclass(slots=True)
class _Table:
    blocks: list[int] = field(default_factory=list)
    since_ns: int = 0  # since when exactly these are held
    block_ns: int = 0  # Σ over blocks of the time held, up to since_ns

    def settle(self, now_ns: int) -> None:
        self.block_ns += len(self.blocks) * (now_ns - self.since_ns)
        self.since_ns = now_ns


class KVManager:
    """Block tables of the running sequences, and for how long each held how much."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._tables: dict[Key, _Table] = {}

    @property
    def free(self) -> int:
        return self._pool.free

    @property
    def usage(self) -> float:
        """Share of the blocks that are held."""
        return 1 - self._pool.free / self._pool.num_blocks

    def blocks_for(self, rows: int) -> int:
        return -(-rows // self.block_size)

    def held(self, key: Key) -> int:
        return len(self._tables[key].blocks) if key in self._tables else 0

    def reserve(self, key: Key, rows: int, now_ns: int) -> list[int] | None:
        """The table of ``key`` with room for rows [0, rows). ``None``: no room, and nothing has changed."""
        table = self._tables.get(key) or _Table(since_ns=now_ns)
        if (lacking := self.blocks_for(rows) - len(table.blocks)) > 0:
            taken = self._pool.take(lacking)
            if taken is None:
                return None
            table.settle(now_ns)
            table.blocks += taken
        self._tables[key] = table
        return table.blocks

    def release(self, key: Key, now_ns: int) -> int:
        """Free all of ``key``; returns its block-nanoseconds. 0 where it held nothing."""
        table = self._tables.pop(key, None)
        if table is None:
            return 0
        table.settle(now_ns)
        self._pool.give_back(table.blocks)
        return table.block_ns

    def check_integrity(self, living: set[Key]) -> None:
        """Each block is free or in exactly one table, and only who runs has one. Raises AssertionError with numbers."""
        free = self._pool.free_blocks()
        held = [block for table in self._tables.values() for block in table.blocks]
        everywhere = sorted(free + held)
        twice = sorted({block for block, after in itertools.pairwise(everywhere) if block == after})
        lost = sorted(set(range(self._pool.num_blocks)) - set(everywhere))
        orphans = self._tables.keys() ^ living
        if twice or lost or orphans:
            raise AssertionError(
                f"{self._pool.num_blocks} blocks, {len(free)} free, {len(held)} held by {len(self._tables)} sequences: "
                f"lost {lost[:20]}, in two places {twice[:20]}, {len(orphans)} tables without sequence or the reverse"
            )
