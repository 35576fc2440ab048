"""What a step makes the device do, in the quantities that its time depends on. Imports no torch.

    step      1                                     weights are read, kernels started, whatever the batch
    rows      R, in stretches between ``KNOTS``     linear layers; bent where memory stops setting the pace
    draws     rows that draw                        the head and the sampling
    context   Σ positions that single rows attend   their attention reads all of these keys and values
    pairs     Σ (row, attended position) of chunks  the attention of several rows of one sequence is arithmetic
    gathered  Σ positions a chunk attends           a later chunk of a prompt first collects what the earlier ones left
    chunks    chunks of several rows                each is a call of its own in every layer

Each grows with the batch. All but step and rows belong to the chunk that brings them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from engine.plan import Chunk, ModelLimits

KNOTS: Final = (0, 8, 32, 128, 512)
_STRETCHES: Final = (*pairwise(KNOTS), (KNOTS[-1], 1 << 62))
ROWS: Final = slice(1, 1 + len(_STRETCHES))  # of Quantities
OWN: Final = slice(ROWS.stop, ROWS.stop + 5)
SIZE: Final = OWN.stop

Quantities = list[float]  # step, rows by stretch, then what chunks bring: in the order above


class Load(NamedTuple):
    """Of one chunk: its rows, and what belongs to it alone."""

    rows: int
    draws: int
    context: int
    pairs: int
    gathered: int
    chunks: int


def attended(chunk: Chunk) -> int:
    """Pairs of a row and a position it attends to: the row at position p attends to p + 1 of them."""
    return (chunk.end * (chunk.end + 1) - chunk.start * (chunk.start + 1)) // 2


def load(chunk: Chunk) -> Load:
    rows, start = len(chunk.tokens), chunk.start
    if rows == 1:
        return Load(1, chunk.draws, start + 1, 0, 0, 0)
    return Load(rows, chunk.draws, 0, attended(chunk), start + rows if start else 0, 1)


def stretches(rows: int) -> list[int]:
    """How many of so many rows lie in each stretch between the knots."""
    return [max(0, min(rows, high) - low) for low, high in _STRETCHES]


def quantities(loads: Sequence[Load]) -> Quantities:
    """Of a step of these chunks."""
    rows, *own = map(sum, zip(*loads, strict=True))
    return [1.0, *map(float, stretches(rows)), *map(float, own)]


def by_rule(limits: ModelLimits, *, fixed_rows: int) -> Quantities:
    """Coefficients before anything was measured: multiply-adds, and a fixed part worth ``fixed_rows`` rows."""
    row, pair = limits.macs_per_row, limits.macs_per_attended
    rule = [fixed_rows * row, *[row] * len(_STRETCHES), limits.macs_per_draw, pair, pair, 0, 0]
    return [float(value) for value in rule]
