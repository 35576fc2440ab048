"""The blocks. Each is in exactly one state:

    free   holds nothing of use
    held   in the tables of ``references`` sequences, at least one; it may have a name by then
    idle   in no table, but named: it waits to be taken up again, and is evicted when blocks run out

Evicted is the one that has been idle for longest. A table gives back its last block first and whoever holds a block
holds all before it, so a block goes before the one it follows: what is cached can always be reached.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from engine.kv.prefix import Link


class BlockPool:
    """Free blocks are taken the last freed first: its memory is the warmest."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._idle: OrderedDict[int, None] = OrderedDict()  # the longest idle first
        self._references = [0] * num_blocks
        self._links: dict[int, Link] = {}
        self._named: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks that can be taken: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Blocks that can be taken up by name."""
        return len(self._named)

    def references(self, block: int) -> int:
        return self._references[block]

    def find(self, name: bytes) -> int | None:
        return self._named.get(name)

    def take(self, count: int) -> list[int] | None:
        """``None``: no room, and nothing is taken."""
        if count > self.free:
            return None
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more table holds these named blocks."""
        for block in blocks:
            self._references[block] += 1
            self._idle.pop(block, None)

    def give_back(self, blocks: Sequence[int]) -> None:
        """A table holds these no longer."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._links:
                self._idle[block] = None
            else:
                self._free.append(block)

    def publish(self, block: int, link: Link) -> int:
        """The held ``block`` has this content from now on, for good. Where another one has it already, the caller
        holds that one instead. Returns the block to hold.
        """
        known = self._named.setdefault(link.name, block)
        if known == block:
            self._links[block] = link
        else:
            self.share([known])
            self.give_back([block])
        return known

    def faults(self, tables: Iterable[Sequence[int]]) -> list[str]:
        """What is wrong when these tables are all there are; nothing should be."""
        holders = Counter(block for table in tables for block in table)
        places = Counter([*self._free, *self._idle, *holders])
        blocks = range(self.num_blocks)
        kinds = {
            "lost": [b for b in blocks if not places[b]],
            "in two places": [b for b in places if places[b] > 1],
            "miscounted": [b for b in blocks if self._references[b] != holders[b]],
            "idle without a name": [b for b in self._idle if b not in self._links],
            "free with a name": [b for b in self._free if b in self._links],
            "misnamed": [b for b, link in self._links.items() if self._named.get(link.name) != b],
            "unreachable": [b for b, link in self._links.items() if link.parent and link.parent not in self._named],
        }
        if len(self._links) != len(self._named):
            kinds["misnamed"] += list(self._named.values())
        return [f"{kind} {sorted(found)[:20]}" for kind, found in kinds.items() if found]

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._named[self._links.pop(block).name]
        return block
