"""What the recorder counts for Prometheus.

records      new in the books, by kind (settlement, attempt, interval); repeated ones
batches      transactions, their time, and the age of a batch's oldest record when it was committed
trouble      dead letters by error; requests that no price or no rate was in force for
"""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

_SECONDS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800)

RECORDS: Final = Counter("pennyweight_recorder_records", "Records that were new in the books", ("kind",))
REPEATED: Final = Counter("pennyweight_recorder_repeated", "Records that were in the books already")
BATCHES: Final = Histogram("pennyweight_recorder_batch_seconds", "Transactions of the recorder", buckets=_SECONDS)
LAG: Final = Histogram(
    "pennyweight_recorder_lag_seconds", "From a record's sending to its commit, oldest of a batch", buckets=_SECONDS
)
BACKLOG: Final = Gauge(
    "pennyweight_recorder_backlog", "Records in the stream, not committed", multiprocess_mode="livemax"
)
DEAD_LETTERS: Final = Counter("pennyweight_recorder_dead_letters", "Records that the books will not take", ("error",))
UNPRICED: Final = Counter("pennyweight_unpriced_requests", "Requests booked while no price was in force", ("model",))
UNCOSTED: Final = Counter(
    "pennyweight_uncosted_requests", "Requests booked while their device had no rate", ("device_kind",)
)
