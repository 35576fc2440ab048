"""Latencies as counts in fixed buckets: they add up over time, tenants and processes, and give quantiles.

Twenty bounds to a decade, from one millisecond to a thousand seconds: the preferred numbers R20 of ISO 3, each about an
eighth above the one before. Changing BOUNDS means rolling up every bucket anew: a migration that marks them dirty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Final

_R20: Final = (100, 112, 125, 140, 160, 180, 200, 224, 250, 280, 315, 355, 400, 450, 500, 560, 630, 710, 800, 900)
BOUNDS: Final = (*(Decimal(step).scaleb(exponent) for exponent in range(-5, 1) for step in _R20), Decimal(1000))
SIZE: Final = len(BOUNDS) + 1  # bucket n counts values in [BOUNDS[n - 1], BOUNDS[n])
ERROR: Final = Decimal("0.07")  # what a quantile from BOUNDS[0] to BOUNDS[-1] can be off by, as a share of the true one

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
    """The value that ``share`` of the counted are at or below, within ERROR; None if none was counted.

    It is the geometric middle of the value's bucket, to four digits. Below the first bound and from the last one on it
    is that bound.
    """
    wanted = share * sum(counts)
    below = 0
    for n, count in enumerate(counts):
        below += count
        if count and below >= wanted:
            low, high = BOUNDS[max(n - 1, 0)], BOUNDS[min(n, len(BOUNDS) - 1)]
            return Decimal(f"{(low * high).sqrt():.4g}")
    return None
