"""Latencies as counts in fixed buckets: they add up over time, tenants and processes, and give quantiles.

Six bounds to a decade, from one millisecond to a thousand seconds. Changing BOUNDS means rolling up every bucket anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Final

_STEPS: Final = (10, 15, 20, 30, 50, 70)
BOUNDS: Final = (*(Decimal(step).scaleb(exponent) for exponent in range(-4, 2) for step in _STEPS), Decimal(1000))
SIZE: Final = len(BOUNDS) + 1  # bucket n counts values in [BOUNDS[n - 1], BOUNDS[n])

_LITERAL: Final = f"ARRAY[{', '.join(format(bound, 'f') for bound in BOUNDS)}]::numeric[]"


def bucket_sql(column: str) -> str:
    """SQL for the bucket number of a NUMERIC column; NULL stays NULL."""
    return f"width_bucket({column}, {_LITERAL})"


def counts_sql(bucket: str) -> str:
    """SQL aggregate: an array of how often each value of ``bucket``, a bucket number, occurs."""
    return f"ARRAY[{', '.join(f'count(*) FILTER (WHERE {bucket} = {n})' for n in range(SIZE))}]"


def add(histograms: Iterable[Sequence[int]]) -> list[int]:
    total = [0] * SIZE
    for counts in histograms:
        total = [a + b for a, b in zip(total, counts, strict=True)]
    return total


def quantile(counts: Sequence[int], share: Decimal) -> Decimal | None:
    """The value that ``share`` of the counted are below, interpolated within its bucket; None if none was counted."""
    wanted = share * sum(counts)
    below = Decimal(0)
    for n, count in enumerate(counts):
        if count and below + count >= wanted:
            low = BOUNDS[n - 1] if n else Decimal(0)
            high = BOUNDS[n] if n < len(BOUNDS) else low
            return low + (high - low) * (wanted - below) / count
        below += count
    return None
