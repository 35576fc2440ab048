"""Which block of KV memory holds what, and for whom. The memory itself is the runner's. Imports no torch.

    pool     [0 ········· num_blocks)       block numbers; each is free, held by one or more tables, or idle
    table    block i of a sequence holds its rows [i * block_size, (i + 1) * block_size)
    prefix   [0 ········· cached)           whole blocks at the head of a table that an earlier sequence has computed

The manager owns all blocks. A sequence gets blocks by ``reserve`` and loses them all by ``release``: when it ends and
when it is preempted, both said by the scheduler. Nobody else takes or frees. Nobody writes to a block that has a name,
so it may be in several tables at once; in none it is idle, and goes to whoever takes up its content or needs room.

prefix — names of what blocks hold
pool — blocks: free, held, idle
manager — tables of sequences
"""

from __future__ import annotations

from engine.kv.manager import Key, KVManager
from engine.kv.pool import BlockPool
from engine.kv.prefix import Chain

__all__ = ["BlockPool", "Chain", "KVManager", "Key"]
