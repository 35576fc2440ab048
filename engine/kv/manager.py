"""Block tables of the running sequences, for how long each held how much, and which of their rows others may use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

from engine.kv.pool import BlockPool
from engine.kv.prefix import Chain, reusable_blocks

Key = tuple[UUID, int]  # request and choice


@dataclass(slots=True)
class _Table:
    blocks: list[int] = field(default_factory=list)
    named: int = 0  # blocks[:named] have names
    since_ns: int = 0  # since when exactly these are held
    block_ns: int = 0  # Σ over blocks of the time held, up to since_ns; a shared block counts for each holder

    def settle(self, now_ns: int) -> None:
        self.block_ns += len(self.blocks) * (now_ns - self.since_ns)
        self.since_ns = now_ns


class KVManager:
    """``caching``: whether computed blocks get names, and so can be taken up by later sequences."""

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool = True) -> None:
        self.block_size = block_size
        self._caching = caching
        self._pool = BlockPool(num_blocks)
        self._tables: dict[Key, _Table] = {}

    @property
    def free(self) -> int:
        """Blocks in no table, those that are cached included."""
        return self._pool.free

    @property
    def cached(self) -> int:
        return self._pool.cached

    @property
    def usage(self) -> float:
        """Share of the blocks that are in tables."""
        return 1 - self._pool.free / self._pool.num_blocks

    def blocks_for(self, rows: int) -> int:
        return -(-rows // self.block_size)

    def held(self, key: Key) -> int:
        return len(self._tables[key].blocks) if key in self._tables else 0

    def find(self, chain: Chain, tokens: Sequence[int]) -> list[int]:
        """The blocks that hold the longest known prefix of these tokens, at least the last of which is left out. Valid
        until blocks are taken.
        """
        found: list[int] = []
        for number in range(reusable_blocks(len(tokens), self.block_size)):
            block = self._pool.find(chain.link(number, tokens, self.block_size).name)
            if block is None:
                break
            found.append(block)
        return found

    def fits(self, rows: int, prefix: Sequence[int] = (), *, spare: int = 0, leaving: Sequence[Key] = ()) -> bool:
        """Whether there is room for a new table of so many rows that begins with ``prefix``, and for ``spare`` more
        blocks, once the tables ``leaving`` are released.
        """
        lacking = self.blocks_for(rows) - len(prefix) + spare
        room = self._pool.free - sum(not self._pool.references(block) for block in prefix)
        if lacking <= room or lacking > room + sum(map(self.held, leaving)):
            return lacking <= room
        let_go = Counter(block for key in leaving for block in self._tables[key].blocks)
        stays = set(prefix)
        freed = sum(self._pool.references(b) == count and b not in stays for b, count in let_go.items())
        return lacking <= room + freed

    def reserve(self, key: Key, rows: int, now_ns: int, *, prefix: Sequence[int] = ()) -> list[int] | None:
        """The table of ``key`` with room for rows [0, rows); a new one begins with ``prefix`` as ``find`` gave it.
        ``None``: no room, and nothing has changed.
        """
        table = self._tables.get(key)
        if table is None:
            if not self.fits(rows, prefix):
                return None
            self._pool.share(prefix)
            table = self._tables[key] = _Table(blocks=list(prefix), named=len(prefix), since_ns=now_ns)
        if (lacking := self.blocks_for(rows) - len(table.blocks)) > 0:
            taken = self._pool.take(lacking)
            if taken is None:
                return None
            table.settle(now_ns)
            table.blocks += taken
        return table.blocks

    def publish(self, key: Key, chain: Chain, tokens: Sequence[int], computed: int) -> None:
        """Rows [0, computed) of ``key`` are there: the blocks that they fill may be taken up from now on."""
        table = self._tables[key]
        if not self._caching:
            return
        for number in range(table.named, computed // self.block_size):
            link = chain.link(number, tokens, self.block_size)
            table.blocks[number] = self._pool.publish(table.blocks[number], link)
            table.named = number + 1

    def release(self, key: Key, now_ns: int) -> int:
        """``key`` holds nothing any more; returns its block-nanoseconds. 0 where it held nothing."""
        table = self._tables.pop(key, None)
        if table is None:
            return 0
        table.settle(now_ns)
        self._pool.give_back(table.blocks)
        return table.block_ns

    def check_integrity(self, living: set[Key]) -> None:
        """Each block is where it belongs and counted right, what is cached can be found, and only who runs has a table.
        Raises AssertionError with numbers.
        """
        faults = self._pool.faults([table.blocks for table in self._tables.values()])
        if orphans := self._tables.keys() ^ living:
            faults.append(f"{len(orphans)} tables without sequence or the reverse")
        if faults:
            raise AssertionError(
                f"{self._pool.num_blocks} blocks, {self.free} of them to be had, {len(self._tables)} sequences: "
                + ", ".join(faults)
            )
