"""Names for what a full block holds: SHA-256 over the name of the block before it and its own tokens.

So two blocks have one name only when their sequences agree from the first token to the end of the block, and began with
the same salt. A name can be made only by who knows all these tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple


class Link(NamedTuple):
    name: bytes
    parent: bytes | None  # name of the block before it; None: it is the first


class Chain:
    """Names of the full blocks of one sequence, each made once. Its tokens only grow."""

    def __init__(self, salt: str) -> None:
        self._root = hashlib.sha256(salt.encode()).digest()
        self._names: list[bytes] = []

    def link(self, number: int, tokens: Sequence[int], block_size: int) -> Link:
        """Of block ``number``, which ``tokens`` fill."""
        for known in range(len(self._names), number + 1):
            block = array("q", tokens[known * block_size : (known + 1) * block_size])
            before = self._names[-1] if self._names else self._root
            self._names.append(hashlib.sha256(before + block.tobytes()).digest())
        return Link(self._names[number], self._names[number - 1] if number else None)


def reusable_blocks(tokens: int, block_size: int) -> int:
    """How many blocks of a sequence may come from the cache. At least one token is always computed, whatever KV is
    already there: the next token comes from the logits of the last row.
    """
    return (tokens - 1) // block_size
